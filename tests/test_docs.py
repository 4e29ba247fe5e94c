"""The programs in README and docs run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from samestep.trainer import seed_everything
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parent.parent


def programs() -> list[Any]:
    found: list[Any] = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL), 1):
            found.append(pytest.param(code, id=f"{page.name}-{number}"))
    return found


@pytest.mark.parametrize("code", programs())
def test_a_program_in_the_docs_runs(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "batch_size=64"])
    seed_everything(0)
    images, targets = torch.randn(64, 8, 8), torch.randint(0, 10, (64,))
    loader = DataLoader(TensorDataset(images, targets), 16)
    exec(
        compile(code, "docs", "exec", dont_inherit=True),
        {"train_loader": loader, "val_loader": loader, "__name__": "docs"},
    )


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"]:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text("utf-8")):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_files_named_in_the_progress_table_exist() -> None:
    text = (ROOT / "docs" / "progress.md").read_text("utf-8")
    for name in set(re.findall(r"`(test_\w+\.py)", text)):
        assert (ROOT / "tests" / name).exists(), name
    for file, test in re.findall(r"`(test_\w+\.py)::(test_\w+)", text):
        assert f"def {test}(" in (ROOT / "tests" / file).read_text("utf-8"), test
