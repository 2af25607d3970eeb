"""KV transfer as users ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gristmill.runtime.errors import UsageError
from gristmill.runtime.integers import plain
from gristmill.runtime.kv_transfer import CachePool, Store, StoreSpec, failures, stores
from gristmill.runtime.kv_transfer.tiers import Tiers


@dataclass(frozen=True)
class KVTransfer:
    """Where an engine keeps blocks of its KV cache besides the cache. Ids are the same as without: what cannot be loaded is computed.

    Args:
        stores: ``NAME[:ARGUMENT]`` of each, as ``gristmill supported`` lists them, the fastest first: ``("host:8GiB", "file:/var/kv:200GiB")``.
        save_after: a block is saved when it has been seen in this many requests: 1 = at once, as a process does that computes prompts for
            others; 2 keeps prompts out that never come again; 0 = never. Blocks of a request that is preempted are always saved, but at 0.
        load: whether blocks are loaded.
        timeout: seconds that a request waits for its blocks at most; then they are computed.
        identity: names the weights, for models that are not read from files; None = a hash of the model's files.

    Raises:
        UsageError: an unknown store, an argument that it does not take, a number out of range.
    """

    stores: Sequence[str]
    save_after: int = 2
    load: bool = True
    timeout: float = 5.0
    identity: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stores, str) or not self.stores:
            raise UsageError(f"stores must be one or more texts such as 'host:8GiB', got {self.stores!r}")
        object.__setattr__(self, "stores", tuple(self.stores))
        for store in self.stores:
            if _spec(store).caches and len(self.stores) > 1:
                raise UsageError(
                    f"{store} keeps no copies of blocks, so it cannot be combined with other stores"
                )
        object.__setattr__(self, "save_after", plain(self.save_after))
        if type(self.save_after) is not int or not 0 <= self.save_after <= 255:
            raise UsageError(f"save_after must be an integer from 0 to 255, got {self.save_after!r}")
        if type(self.load) is not bool or not (self.load or self.save_after):
            raise UsageError(f"load must be True, or False where blocks are saved, got {self.load!r}")
        if (
            isinstance(self.timeout, bool)
            or not isinstance(self.timeout, int | float)
            or not self.timeout > 0
        ):
            raise UsageError(f"timeout must be seconds, more than 0, got {self.timeout!r}")
        if not (self.identity is None or (isinstance(self.identity, str) and self.identity)):
            raise UsageError(f"identity must be a text or None, got {self.identity!r}")

    def open(self) -> Store | CachePool:
        """The stores, as one."""
        opened = [_spec(store).open(store.partition(":")[2]) for store in self.stores]
        return (
            opened[0]
            if len(opened) == 1
            else Tiers([one for one in opened if not isinstance(one, CachePool)])
        )

    @staticmethod
    def parse(text: str | KVTransfer) -> KVTransfer:
        """From ``STORE[+STORE][,save_after=N][,load=no][,timeout=S][,identity=TEXT]``, such as ``host:8GiB+file:/var/kv,save_after=1``."""
        if isinstance(text, KVTransfer):
            return text
        if not isinstance(text, str):
            raise UsageError(
                f"kv_transfer must be a KVTransfer or a text such as 'host:8GiB', got {type(text).__name__}"
            )
        names, *options = text.split(",")
        given: dict[str, str] = {}
        for option in options:
            name, equals, value = option.partition("=")
            if not equals or name not in ("save_after", "load", "timeout", "identity"):
                raise UsageError(
                    f"kv_transfer={text!r}: expected save_after=, load=, timeout= or identity=, got {option!r}"
                )
            given[name] = value
        load = given.get("load", "yes")
        if load not in ("yes", "no"):
            raise UsageError(f"kv_transfer={text!r}: load is yes or no, got {load!r}")
        try:
            save_after, timeout = int(given.get("save_after", 2)), float(given.get("timeout", 5.0))
        except ValueError as error:
            raise UsageError(f"kv_transfer={text!r}: {error}") from error
        return KVTransfer(names.split("+"), save_after, load == "yes", timeout, given.get("identity"))


def _spec(store: str) -> StoreSpec:
    name = store.partition(":")[0] if isinstance(store, str) else store
    spec = stores().get(name)
    if spec is None:
        others = "".join(f"; {failure}" for failure in failures())
        raise UsageError(f"unknown KV store {store!r}; known: {', '.join(stores())}{others}")
    return spec
