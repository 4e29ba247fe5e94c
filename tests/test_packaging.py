"""The folders are the packages, and import each other in one direction only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("trainer", "callbacks", "strategies")


def test_the_package_list_is_the_folders() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    found = {
        folder.relative_to(ROOT).as_posix()
        for top in FOLDERS
        for folder in (ROOT / top).rglob("")
        if (folder / "__init__.py").exists()
    }
    assert {f"samestep.{folder.replace('/', '.')}" for folder in found} == set(settings["packages"])
    assert settings["package-dir"] == {f"samestep.{folder}": folder for folder in FOLDERS}
    for folder in FOLDERS:
        assert (ROOT / folder / "py.typed").exists()


def imports(path: Path) -> list[tuple[str, bool]]:
    """The modules a file imports, as dotted names under the root, and whether for types only."""
    package = path.relative_to(ROOT).parent.parts
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, typing: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            typing = True
        if isinstance(node, ast.Import):
            found.extend((alias.name, typing) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            found.append((f"{base}.{node.module or ''}".strip("."), typing))
        for child in ast.iter_child_nodes(node):
            visit(child, typing)

    visit(ast.parse(path.read_text("utf-8")), False)
    return found


FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_go_one_way(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    for module, typing in imports(path):
        top = module.split(".")[0]
        absolute = ast.parse(path.read_text("utf-8"))
        assert not any(
            isinstance(node, ast.Import) and alias.name.split(".")[0] in FOLDERS
            for node in ast.walk(absolute)
            if isinstance(node, ast.Import)
            for alias in node.names
        ), "import the three folders relatively"
        if folder == "strategies":
            assert top not in ("trainer", "callbacks"), module
        if folder == "callbacks" and not typing:
            assert top not in ("trainer", "strategies"), module
        if path.name != "overrides.py":
            assert top != "omegaconf", "only overrides.py knows omegaconf"


def test_importing_pulls_in_nothing_slow() -> None:
    code = (
        "import sys, samestep.trainer, samestep.callbacks, samestep.strategies;"
        "print([m for m in ('tensorboard', 'torchmetrics', 'omegaconf', 'torch._dynamo', 'safetensors') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert output.stdout.strip() == "[]"


def test_public_names() -> None:
    import samestep.callbacks
    import samestep.strategies
    import samestep.trainer

    assert set(samestep.trainer.__all__) == {
        "CheckpointError", "DataModule", "Task", "Trainer", "TrainerConfig", "from_command_line", "scaled_lr",
        "seed_everything", "warmup_schedule",
    }  # fmt: skip
    assert set(samestep.callbacks.__all__) == {
        "BasePredictionWriter", "Callback", "EarlyStopping", "JSONLLogger", "LearningRateMonitor", "Logger",
        "ModelCheckpoint", "ModelSummary", "PredictionWriter", "ProgressBar", "StepPanel", "TensorBoardLogger",
        "read_predictions",
    }  # fmt: skip
    assert set(samestep.strategies.__all__) == {
        "DDPStrategy", "Environment", "Pending", "Precision", "ProcessGroupStrategy", "SingleDeviceStrategy", "Strategy",
        "checkpoint_activations", "launch_function",
    }  # fmt: skip
