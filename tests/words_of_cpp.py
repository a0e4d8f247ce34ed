"""What a message of Python's says in C++."""

import re

_NAMES = {
    **{"float32": "Float", "float64": "Double", "bfloat16": "BFloat16"},
    **{"float16": "Half", "int64": "Long", "strided": "Strided"},
    "sparse_coo": "Sparse",
}


def in_words_of_cpp(error: BaseException | str) -> str:
    """The message with arguments, dtypes, layouts and constants as C++ has them."""
    text = re.sub(r"\b(\w+)='(\w+)'", r'\1("\2")', str(error))
    text = re.sub(r"\b(\w+)=(\d+|True|False)\b", r"\1(\2)", text)
    text = re.sub(r"\btorch\.(\w+)", lambda name: f"torch::k{_NAMES[name[1]]}", text)
    return re.sub(r"\b(None|True|False)\b", lambda word: word[0].lower(), text)
