"""One table of colours: a resource has the same one in every chart, in the page and in the exported trace."""

from __future__ import annotations

from typing import Final

# Okabe and Ito's colours, which people with any colour vision tell apart; the machine's sums are darker than their parts.
RESOURCE_COLORS: Final[dict[str, str]] = {
    "compute": "#0072B2",
    "copy_in": "#56B4E9",
    "copy_out": "#E69F00",
    "ssd_read": "#009E73",
    "ssd_write": "#D55E00",
    "adam": "#CC79A7",
    "net_pair": "#5E7F3A",
    "net_local": "#8C9B2F",
    "net_cross": "#7B3FA0",
    "host_cores": "#3C4A75",
    "ssd": "#6B5A1E",
}
OTHER: Final = "#7A7A7A"  # a resource that the table does not know
STALL: Final = "#B3123C"
INK: Final = "#1F2430"
FAINT: Final = "#C9CDD6"
ARM_COLORS: Final[dict[str, str]] = {"stock": "#9AA1AF", "vertical": INK}

# kind of work -> (category, one of the names of colours that chrome://tracing knows)
STREAMS: Final[dict[str, tuple[str, str]]] = {
    "F": ("forward", "thread_state_running"),
    "preF": ("forward", "thread_state_running"),
    "B": ("backward", "rail_response"),
    "preB": ("backward", "rail_response"),
    "HEAD": ("head", "rail_animation"),
    "REDUCE": ("gradients", "olive"),
    "preREDUCE": ("gradients", "olive"),
    "sufREDUCE": ("gradients", "olive"),
    "NORM": ("gradients", "olive"),
    "HOLD": ("gradients", "olive"),
    "FETCH": ("parameters", "good"),
    "FETCH copy": ("parameters", "good"),
    **dict.fromkeys(
        ("SPREAD", "SPREAD pair", "SPREAD local", "FETCH pair", "FETCH local", "FETCH cross"), ("parameters", "good")
    ),
    **dict.fromkeys(("CROSS", "REDUCE pair", "REDUCE local", "REDUCE cross"), ("gradients", "olive")),
    "STEP read": ("state", "thread_state_iowait"),
    "STEP write": ("state", "thread_state_uninterruptible"),
    "STEP adam": ("optimizer", "rail_load"),
    "LOAD": ("activations", "yellow"),
    "SAVE": ("activations", "yellow"),
    "LOAD copy": ("activations", "yellow"),
    "SAVE copy": ("activations", "yellow"),
    "KLOAD": ("kept for the backward", "vsync_highlight_color"),
    "KSAVE": ("kept for the backward", "vsync_highlight_color"),
    "KLOAD copy": ("kept for the backward", "vsync_highlight_color"),
    "KSAVE copy": ("kept for the backward", "vsync_highlight_color"),
}
OTHER_STREAM: Final = ("other", "generic_work")
WAIT_STREAM: Final = ("wait", "terrible")
ISSUE_STREAM: Final = ("issue", "grey")
STEP_STREAM: Final = ("step", "white")


def colour(resource: str) -> str:
    """The resource's colour."""
    return RESOURCE_COLORS.get(resource, OTHER)
