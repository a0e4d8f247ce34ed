"""The parts of the EWSG example: networks, methods, chains, diagnostics, report."""
