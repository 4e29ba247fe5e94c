"""Options from the command line: typed, later wins, and what is wrong is named in one line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from samestep.trainer import TrainerConfig, from_command_line
from samestep.trainer.overrides import apply_overrides


@dataclass(frozen=True)
class Options:
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(max_epochs=5))
    rate: float = 0.1
    count: int = 3
    name: str = "x"  # of the run
    nick: str | None = None
    """A shorter name,
    where there is one."""
    side: Literal["left", "1e3"] = "left"
    either: int | str = 0
    flag: bool = False
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    names: list[str] = field(default_factory=list[str])
    shares: dict[str, float] = field(default_factory=dict[str, float])


@pytest.mark.parametrize(
    ("argument", "path", "value"),
    [
        ("trainer.max_epochs=3", "trainer.max_epochs", 3),
        ("trainer.max_epochs=null", "trainer.max_epochs", None),
        ("trainer.limit_train_batches=0.5", "trainer.limit_train_batches", 0.5),
        ("trainer.limit_train_batches=2", "trainer.limit_train_batches", 2),
        ("trainer.devices=2", "trainer.devices", 2),
        ("trainer.devices=auto", "trainer.devices", "auto"),
        ("trainer.devices=[0,1]", "trainer.devices", [0, 1]),
        ("trainer.precision=64-true", "trainer.precision", "64-true"),
        ("trainer.max_time=00:12:30:00", "trainer.max_time", "00:12:30:00"),
        ("trainer.deterministic=warn", "trainer.deterministic", "warn"),
        ("trainer.gradient_clip_val=1e-1", "trainer.gradient_clip_val", 0.1),
        ("rate=1e-5", "rate", 1e-5),
        ("rate=10e2", "rate", 1000.0),
        ("rate=2", "rate", 2.0),
        ("count=010", "count", 10),
        ("name=123", "name", "123"),
        ("name=12:30", "name", "12:30"),
        ("name=a=b", "name", "a=b"),
        ("name=1e3", "name", "1e3"),
        ("name=010", "name", "010"),
        ("name=true", "name", "true"),
        ("name=null", "name", "null"),
        ("name=[1", "name", "[1"),
        ("name={}", "name", "{}"),
        ("name=${rate}", "name", "${rate}"),
        ("nick=1e3", "nick", "1e3"),
        ("nick=null", "nick", None),
        ("side=1e3", "side", "1e3"),
        ("either=1e3", "either", "1e3"),
        ("either=7", "either", 7),
        ("either=true", "either", "true"),
        ("names=[1e3, 010, null]", "names", ["1e3", "010", "null"]),
        ("sizes=[010, 5]", "sizes", [10, 5]),
        ("shares={010: 1e-3, b: 2}", "shares", {"010": 0.001, "b": 2.0}),
        ("trainer.max_time={hours: 1}", "trainer.max_time", {"hours": 1}),
        ("flag=true", "flag", True),
        ("sizes=[4,5,6]", "sizes", [4, 5, 6]),
    ],
)
def test_an_override_is_read_as_the_fields_type(argument: str, path: str, value: Any) -> None:
    options: Any = apply_overrides(Options(), [argument])
    for name in path.split("."):
        options = getattr(options, name)
    assert options == value
    assert type(options) is type(value)


def test_the_last_one_wins_and_the_rest_stays() -> None:
    options = apply_overrides(Options(), ["count=1", "trainer.max_epochs=2", "count=7"])
    assert options == Options(TrainerConfig(max_epochs=2), count=7)
    assert apply_overrides(Options(), []) == Options()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("coutn=1", "'coutn=1': there is no option 'coutn': did you mean 'count=1'"),
        ("trainer.max_epoch=1", "did you mean 'trainer.max_epochs=1'"),
        ("max_epochs=3", "there is no option 'max_epochs': did you mean 'trainer.max_epochs=3'"),
        ("max_epoch=3", "did you mean 'trainer.max_epochs=3'"),
        ("--count=3", "there is no option '--count': did you mean 'count=3'"),
        ("trainer.count=3", "did you mean 'count=3'"),
        ("zzz=3", "there is no option 'zzz': --help lists those there are"),
        ("--count", "'--count': expected name=value"),
        ("rate=null", "rate=null"),
        ("sizes=[1, x]", "sizes=.1, x"),
        ("count", "expected name=value"),
        ("count=", "expected name=value"),
        ("=3", "expected name=value"),
        ("count=1.5", "count=1.5"),
        ("count=three", "count=three"),
        ("rate=fast", "rate=fast"),
        ("flag=maybe", "flag=maybe"),
        ("trainer=5", "trainer=5"),
        ("trainer.max_epochs=-5", "max_epochs=-5: expected a whole number"),
        ("trainer.gradient_clip_algorithm=l2", "l2"),
        ("sizes=[1,", "sizes=.1,"),
    ],
)
def test_a_wrong_override_is_named(
    argument: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        apply_overrides(Options(), [argument])
    assert "\n" not in str(error.value)
    monkeypatch.setattr("sys.argv", ["train.py", argument])
    with pytest.raises(SystemExit) as leaving:
        from_command_line(Options())
    assert leaving.value.code == 2
    assert capsys.readouterr().err.startswith("train.py: ")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("trainer.precision=8", "precision=8: expected one of 32-true, 64-true"),
        ("trainer.precision=half", "precision='half': expected one of"),
        ("trainer.strategy=foo", "strategy='foo': expected one of auto, ddp"),
        ("trainer.devices=abc", "devices='abc' on the CPU: expected a number"),
        ("trainer.devices=0", "devices=0 on the CPU"),
        ("trainer.num_nodes=2", "num_nodes=2 without torchrun"),
    ],
)
def test_what_only_a_trainer_would_refuse_is_refused_on_the_command_line(
    argument: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "trainer.accelerator=cpu", argument])
    with pytest.raises(SystemExit) as leaving:
        from_command_line(Options())
    assert leaving.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"train.py: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_the_options_with_types_defaults_and_words(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["code/train.py", "rate=5", flag])
    with pytest.raises(SystemExit) as leaving:
        from_command_line(Options())
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: train.py [name=value …]\n")
    assert "\n\nrate: float = 0.1\n\n" in shown
    assert "\n\nname: str = 'x'\n    of the run\n\n" in shown
    assert "\n\nnick: str | None = None\n    A shorter name, where there is one.\n\n" in shown
    assert "\n\ntrainer.max_epochs: int | None = 5\n    Epochs to train; -1: no limit." in shown


def test_help_is_printed_by_rank_0_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        from_command_line(Options(), ["--help"])
    assert capsys.readouterr().out == ""
