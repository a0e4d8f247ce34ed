"""Samplers inside the Trainer of Hugging Face's transformers."""

import re
from typing import Any

import pytest
import torch
from framework_problem import EVERY, collector_of
from short_chains import assert_same
from stored_files import contents
from torch import nn

import torch_sgmcmc as sg

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("one_thread"),
]

NUM_DATA = 24


class Sentences(torch.utils.data.Dataset[Any]):
    """Random words and labels."""

    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.words = torch.randint(20, (NUM_DATA, 5), generator=g)
        self.labels = torch.randint(2, (NUM_DATA,), generator=g)

    def __len__(self):
        return NUM_DATA

    def __getitem__(self, i):
        return {"input_ids": self.words[i], "labels": self.labels[i]}


def new_model(dropout=0.1):
    transformers.set_seed(7)
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"max_position_embeddings": 8, "hidden_dropout_prob": dropout}
    config = transformers.BertConfig(**sizes, attention_probs_dropout_prob=dropout)
    return transformers.BertForSequenceClassification(config)


def arguments_of(folder, steps, **settings):
    return transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        max_grad_norm=0.0,  # would clip gradients at a norm of 1
        lr_scheduler_type="constant",  # would let lr go to zero
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        logging_strategy="no",
        **{"save_strategy": "no", "per_device_train_batch_size": 8, **settings},
    )


def train(kind, folder, steps=6, resume=None, dropout=0.1, **settings):
    model = new_model(dropout)
    # Or accumulated gradients are a sum where the model's loss is a mean.
    model.accepts_loss_kwargs = False
    trainer = transformers.Trainer(
        model,
        arguments_of(folder, steps, **settings),
        train_dataset=Sentences(),
        optimizers=(EVERY[kind](model.parameters()), None),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return trainer


def parameters(trainer):
    return list(trainer.model.parameters())


@pytest.mark.parametrize("kind", ["SGLD", "SGHMC with means", "SGNHT"])
def test_the_chain_resumes_from_a_checkpoint(kind, tmp_path):
    # Six steps are two epochs; the checkpoint is in the middle of the second one.
    whole = train(kind, tmp_path / "whole", save_strategy="steps", save_steps=4)
    resumed = train(kind, tmp_path / "rest", resume=tmp_path / "whole" / "checkpoint-4")
    sampler = resumed.optimizer.optimizer
    assert type(sampler) is type(EVERY[kind]([nn.Parameter(torch.ones(1))]))
    assert sampler.param_groups[0]["step"] == 6
    assert_same(parameters(resumed), parameters(whole))


@pytest.mark.parametrize("parts", [1, 3])
def test_the_chain_equals_that_of_a_loop(parts, tmp_path):
    sizes = {"per_device_train_batch_size": NUM_DATA // parts}
    sizes["gradient_accumulation_steps"] = parts
    trainer = train("SGHMC", tmp_path, steps=4, dropout=0.0, **sizes)
    # A step is of all data then, in whatever order.
    model = new_model(0.0).train()
    sampler = EVERY["SGHMC"](model.parameters())
    batch = torch.utils.data.default_collate(list(Sentences()))
    for _ in range(4):
        sampler.zero_grad()
        model(**batch).loss.backward()
        sampler.step()
    for ours, theirs in zip(model.parameters(), parameters(trainer), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_draws_equal_those_of_a_loop_and_resume(tmp_path):
    seen = []

    def collate(rows):
        seen.append(torch.utils.data.default_collate(rows))
        return seen[-1]

    class Saved(transformers.TrainerCallback):
        def on_save(self, args, state, control, **_):
            folder = tmp_path / f"checkpoint-{state.global_step}"
            sg.save(collector.state_dict(), folder / "collector.pt")

    def run(steps, resume=None):
        nonlocal collector
        model = new_model(0.0)
        sampler = EVERY["SGHMC"](model.parameters())
        collector = collector_of(sampler, model, tmp_path / "run")
        if resume is not None:
            collector.load_state_dict(sg.load(resume / "collector.pt"))
        given = {"train_dataset": Sentences(), "data_collator": collate}
        given |= {"optimizers": (sampler, None), "callbacks": [Saved()]}
        saving = arguments_of(tmp_path, steps, save_strategy="steps", save_steps=9)
        trainer = transformers.Trainer(model, saving, **given)
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        collector.close()

    collector = None
    run(18)
    batches = seen[:18]
    model = new_model(0.0).train()
    sampler = EVERY["SGHMC"](model.parameters())
    with collector_of(sampler, model, tmp_path / "loop"):
        for batch in batches:
            sampler.zero_grad()
            model(**batch).loss.backward()
            sampler.step()
    whole = contents(tmp_path / "loop")["draws"]
    assert len(whole) > 2
    assert contents(tmp_path / "run")["draws"] == whole
    run(18, resume=tmp_path / "checkpoint-9")
    assert contents(tmp_path / "run")["draws"] == whole


@pytest.mark.parametrize("kind", ["PSGLD", "EWSG", "HMC"])
def test_samplers_that_the_trainer_cannot_serve(kind, tmp_path):
    error, message = {
        "PSGLD": (RuntimeError, "PSGLD got gradients without a graph"),
        "EWSG": (TypeError, "EWSG.step() needs a closure"),
        "HMC": (KeyError, "lr"),  # of the scheduler
    }[kind]
    with pytest.raises(error, match=re.escape(message)):
        train(kind, tmp_path)


def test_gamma_with_a_trainer_that_keeps_the_graph(tmp_path):
    class WithGraph(transformers.Trainer):
        def training_step(self, model, inputs, *_):
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss, create_graph=True)
            return loss.detach()

    # The fused attention has no second derivatives.
    model = new_model()
    model.set_attn_implementation("eager")
    sampler = sg.PSGLD(model.parameters(), 1e-3, eps=0.1, num_data=NUM_DATA, seed=0)
    arguments, data = arguments_of(tmp_path, 3), Sentences()
    trainer = WithGraph(
        model, arguments, train_dataset=data, optimizers=(sampler, None)
    )
    trainer.train()
    assert sampler.param_groups[0]["step"] == 3
    assert all(torch.isfinite(p).all() for p in model.parameters())
