"""How the gradients of a bucket become their mean over the ranks: communication hooks for DDP."""

from .codecs import BF16, FP16, Int8
from .compressed import Compressed
from .hierarchical import Hierarchical
from .hook import CommHook, HookContext
from .local_sgd import PostLocalSGD
from .ordered import Bucket, OrderedHook
from .powersgd import PowerSGD
from .reduction import Codec, Plain, Wire
from .registration import register
from .resolve import NAMES, FunctionHook, resolve

__all__ = [
    "BF16", "FP16", "NAMES", "Bucket", "Codec", "CommHook", "Compressed", "FunctionHook", "Hierarchical", "HookContext",
    "Int8", "OrderedHook", "Plain", "PostLocalSGD", "PowerSGD", "Wire", "register", "resolve",
]  # fmt: skip
