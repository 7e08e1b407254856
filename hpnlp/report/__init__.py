"""Reports: the results of a run as text, numbers and a plot (`write`), and a table of several runs (`compare`)."""

from typing import TYPE_CHECKING

from hpnlp.table import exports

if TYPE_CHECKING:
    from hpnlp.report.comparison import by_task, compare
    from hpnlp.report.entries import members
    from hpnlp.report.files import read_metrics, read_report
    from hpnlp.report.single import render, summarize, verdict, write

__all__ = ["by_task", "compare", "members", "read_metrics", "read_report", "render", "summarize", "verdict", "write"]

__getattr__ = exports(
    __name__,
    {
        "by_task": "comparison",
        "compare": "comparison",
        "members": "entries",
        "read_metrics": "files",
        "read_report": "files",
        "render": "single",
        "summarize": "single",
        "verdict": "single",
        "write": "single",
    },
)
