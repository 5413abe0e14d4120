"""Cores of the host among the threads of a process that computes on it.

[Note: one team] torch computes on a team of OpenMP threads per calling thread. Where more of them exist in a process than
there are cores, whether they work or not, the runtime lets them sleep between any two operations instead of waiting awake, and
every operation of every team starts with waking them. A process group's worker with a team of its own, made by one
collective, is enough; so is CPU Adam on a second thread. So where the device is the host, only the thread that trains has a
team, and all others compute on one core, which is what is left for them anyway. A thread that torch never asked (one whose
first work is CPU Adam's own kernel) would take all cores: `adam` lets torch ask.
"""

from __future__ import annotations

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
