"""Exchange a module's class for one derived from it, and back: the object itself, its tensors, names and hooks stay."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, ClassVar, cast

from torch import nn


class Derived:
    """Comes before a module's own class in the derived one, to override its `forward`.

    torch's `fully_shard` works the same way. A wrapper or a copy in the module's place would change names in the state
    dict, lose hooks, and be missed by whatever holds the module outside its parent: a list, a scheduler, a hook.
    """

    prefix: ClassVar[str]
    original: ClassVar[type[nn.Module]]
    # What the derived class keeps in the module: copies share it, pickles and the restored module are without it.
    own_attributes: ClassVar[tuple[str, ...]] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        memo.update((id(vars(self)[name]), vars(self)[name]) for name in self.own_attributes if name in vars(self))
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickled as what it was: pickle can't find a class made here, nor take a process group along. By protocol 1,
        # since that of protocol 2 insists on the object's own class; any protocol can carry it.
        function, arguments, state = cast("tuple[Any, tuple[Any, ...], dict[str, Any]]", super().__reduce_ex__(1))
        arguments = tuple(self.original if argument is type(self) else argument for argument in arguments)
        return function, arguments, {name: value for name, value in state.items() if name not in self.own_attributes}


@cache
def derived_class(kind: type[Derived], original: type[nn.Module]) -> type[nn.Module]:
    """The class with `kind` before `original`: one for each pair, or modules of one kind would differ in type."""
    return type(f"{kind.prefix}{original.__name__}", (kind, original), {"original": original})


def derive(module: nn.Module, kind: type[Derived]) -> None:
    """Put `kind` before the module's class, in place.

    The caller refuses a module with a `forward` set on the object, which would hide that of any class.
    """
    module.__class__ = derived_class(kind, type(module))


def restore(module: nn.Module) -> None:
    """Give a derived module its own class back, in place."""
    derived = cast("Derived", module)
    for name in derived.own_attributes:
        vars(module).pop(name, None)
    module.__class__ = derived.original
