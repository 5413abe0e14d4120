"""Cores of the host among the threads of a process that computes on it.

[Note: one team] torch computes on a team of OpenMP threads per calling thread. Where more of them exist in a process than
there are cores, whether they work or not, the runtime lets them sleep between any two operations instead of waiting awake, and
every operation of every team starts with waking them. A process group's worker with a team of its own, made by one
collective, is enough; so is CPU Adam on a second thread. So where the device is the host, only the thread that trains has a
team, and all others compute on one core, which is what is left for them anyway. A thread that torch never asked (one whose
first work is CPU Adam's own kernel) would take all cores: `adam` lets torch ask. Beside other work on the cores the team is to
sleep after all: see `spinwait`.

Beside a device the host's cores are CPU Adam's. Where several ranks share them, each with a team of all cores, the teams keep
each other off the cores; so a rank's team is its share, unless OMP_NUM_THREADS says how large it is.
"""

from __future__ import annotations

import os
import threading

import torch


def keep_cores_for_this_thread() -> None:
    """Let threads that compute for the first time from now on do so on one core; this one keeps what it has. What torch keeps
    per process is the number for threads to come, and a thread takes it with its first operation: call it ahead of those."""
    torch.get_num_threads()  # this thread takes its number now

    def leave_one() -> None:
        torch.get_num_threads()
        torch.set_num_threads(1)

    other = threading.Thread(target=leave_one)
    other.start()
    other.join()


def serve_device(device: torch.device, num_ranks: int) -> None:
    """Let the calling thread work for `device` from the host, beside those of other ranks: `num_ranks` in all share its cores.
    Nothing changes where the device is the host."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a thread's first one is device 0: whatever it asks of CUDA would set that up, too
        share_cores(num_ranks)


def share_cores(num_ranks: int) -> None:
    """Let the calling thread, and threads that compute for the first time from now on, do so on one of `num_ranks` shares of
    this process's cores at most; OMP_NUM_THREADS wins."""
    num_threads = torch.get_num_threads()
    if num_ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(num_threads, max(1, len(os.sched_getaffinity(0)) // num_ranks)))
