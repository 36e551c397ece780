"""What a run's record says, as one page for people, as pictures, and as figures for notebooks.

``pip install 'rankfold[report]'`` brings the libraries that draw; importing this package loads none of them.
"""

from aggregator.report.write import render_png, write_report

__all__ = ["render_png", "write_report"]
