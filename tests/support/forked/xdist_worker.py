"""The Python that pytest-xdist starts: `python xdist_worker.py ADDRESS` stands in for a forked worker."""

from __future__ import annotations

import sys

from stand_in import end_with, stand_in

end_with(stand_in(sys.argv[1], "support.xdist_worker", []))
