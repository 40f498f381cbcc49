"""Random histories, for as long as is wanted: ``python -m tests.histories FIRST SECONDS``, or ``SEED --one`` for all of one."""

import faulthandler
import logging
import sys
import threading
import time
import traceback
from collections import Counter

from rescale_data.sources.decoded.cache import cache
from tests.histories.books import Silent
from tests.histories.crew import Hang, in_threads
from tests.histories.history import failing_reads
from tests.histories.shards import history_of

EMPTY = ("no sample in two whole epochs", "no token in 2 whole", "no sample in 2 whole", "and kept none", "no row of")
ACCEPTED = (
    "An epoch has", "steps_per_epoch=", "hold less than one global batch", "Two epochs in a row",
    "are not those of one reader", "No node below reads a logical shard", "Files were added to the source",
)  # fmt: skip


def accepts(error: BaseException) -> bool:
    """Whether it refuses what was drawn: too little data, a pipeline that cannot be."""
    alone = any("ALONE" in note for note in getattr(error, "__notes__", ()))
    if isinstance(error, Silent):
        return True
    if not isinstance(error, ValueError):
        return False
    return any(part in str(error) for part in EMPTY) or (not alone and any(part in str(error) for part in ACCEPTED))


def watch(started: list[float], seconds: float = 60) -> None:
    while time.sleep(2) is None:
        if time.time() - started[0] > seconds:
            print(f"### SPINS in seed {started[1]:.0f}", flush=True)
            faulthandler.dump_traceback(file=sys.stdout)
            sys.stdout.flush()
            import os

            os._exit(3)


def main(first: int, seconds: float, one: bool) -> None:
    logging.getLogger("rescale_data").setLevel(logging.CRITICAL)
    begun, results, ops, where, seed = time.time(), Counter[str](), Counter[str](), dict[str, int](), first
    now = [begun, float(first)]
    threading.Thread(target=watch, args=(now,), daemon=True).start()
    with in_threads(), failing_reads():
        while time.time() - begun < seconds:
            now[:] = [time.time(), float(seed)]
            history = history_of(seed)
            try:
                history.play()
                key = "passed"
            except Silent:
                key = "a shard without samples"
            except (Exception, Hang) as error:
                text = f"{type(error).__name__}: {error}"
                accepted = accepts(error)
                key = text[:90] if accepted else "FAILED"
                if not accepted or one:
                    print(f"### {seed}: {text[:900]}", *getattr(error, "__notes__", ()), *history.log, sep="\n   ")
                    print(
                        "   " + "   ".join(traceback.format_tb(error.__traceback__)[-(40 if one else 7) :]), flush=True
                    )
            results[key] += 1
            where.setdefault(key, seed)
            ops += history.ops
            if time.time() - now[0] > 6:
                print(f"slow {seed}: {time.time() - now[0]:.0f} s", flush=True)
            if seed % 50 == 0:
                cache().clear()
            seed += 1
            if one or results["FAILED"] > 12:
                break
    print(f"seeds {first}..{seed - 1}, {time.time() - begun:.0f} s")
    for key, count in results.most_common():
        print(f"{count:6d}  {key}  (first {where[key]})")
    print(dict(ops))


if __name__ == "__main__":
    main(
        int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 and sys.argv[2][0] != "-" else 60, "--one" in sys.argv
    )
