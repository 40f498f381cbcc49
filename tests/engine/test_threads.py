"""Background threads end: with the object that has them, and with the interpreter, also while a read hangs."""

import subprocess
import sys
import threading

from rescale_data.engine.threads import TaskThread


def test_tasks_run_in_order_and_end_waits_for_them() -> None:
    done: list[int] = []
    thread = TaskThread("test")
    for number in range(100):
        thread.put(lambda number=number: done.append(number))
    thread.end()
    assert done == list(range(100))
    thread.end()  # once more


def test_the_thread_ends_with_its_object() -> None:
    thread = TaskThread("test")
    (background,) = (each for each in threading.enumerate() if each.name == "rescale_data-test")
    del thread
    background.join(60)
    assert not background.is_alive()


HANGS = """
import threading
import rescale_data as rd

reads = threading.Event()

class Rows:
    def __len__(self):
        return 8

    def __getitem__(self, row):
        if row == 3:
            reads.set()
            threading.Event().wait()
        return row

loader = rd.DataLoader(Rows(), shuffle=False, global_batch_size=1, prefetch=4)
next(iter(loader))
reads.wait()
print("ends")
"""


def test_a_read_that_hangs_does_not_keep_the_process_alive() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ends\n", "")
