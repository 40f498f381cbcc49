"""Random histories, for as long as is wanted: ``python -m tests.histories FIRST SECONDS``, or ``SEED --one`` for all of one."""

import faulthandler
import logging
import sys
import time
import traceback
from collections import Counter

from tests.histories.crew import Hang, in_threads
from tests.histories.history import accepts, failing_reads
from tests.histories.shards import history_of


def main(first: int, seconds: float, one: bool) -> None:
    logging.getLogger("rescale_data").setLevel(logging.CRITICAL)
    end, seed, results, ops = time.time() + seconds, first, Counter[str](), Counter[str]()
    with in_threads(), failing_reads():
        while time.time() < end and results["FAILED"] < 12 and not (one and seed > first):
            faulthandler.dump_traceback_later(60, exit=True)
            history, key = history_of(seed), "passed"
            try:
                history.play()
            except (Exception, Hang) as error:
                key = f"{type(error).__name__}: {error}"[:90] if accepts(error) else "FAILED"
                if one or key == "FAILED":
                    print(f"### {seed}: {error!r:.900}", *getattr(error, "__notes__", ()), *history.log, sep="\n   ")
                    print(*traceback.format_tb(error.__traceback__)[-(40 if one else 7) :], flush=True)
            results[key] += 1
            ops += history.ops
            seed += 1
    print(
        f"seeds {first}..{seed - 1}",
        *(f"{count:6d}  {key}" for key, count in results.most_common()),
        dict(ops),
        sep="\n",
    )


if __name__ == "__main__":
    given = [each for each in sys.argv[1:] if each[0] != "-"]
    main(int(given[0]), float(given[1]) if len(given) > 1 else 60, "--one" in sys.argv)
