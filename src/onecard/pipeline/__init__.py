"""Pipeline schedules as data: made, proved, priced and drawn before anything runs.

    from onecard import pipeline

    schedule = pipeline.one_f_one_b(ranks=4, microbatches=8)
    print(pipeline.check_schedule(schedule, pipeline.Times(18.5, 18.1, 9.3, 0.6)))
    print(pipeline.draw_text(schedule))

``Runner`` runs any of them; ``onecard.fleet.PipelineLayer`` makes stages of a list of layers.
"""

from onecard.pipeline.action import Action, Schedule
from onecard.pipeline.check import check_schedule
from onecard.pipeline.csv_file import read_csv, write_csv
from onecard.pipeline.draw import draw_figure, draw_text, draw_trace
from onecard.pipeline.marks import step_by_marks
from onecard.pipeline.memory import Sizes, peak_memory
from onecard.pipeline.messages import with_messages
from onecard.pipeline.meter import Meter
from onecard.pipeline.report import Report
from onecard.pipeline.run import Runner
from onecard.pipeline.schedule import (
    breadth_first,
    eager_one_f_one_b,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from onecard.pipeline.schedule_auto import zb_1p, zb_2p, zb_auto
from onecard.pipeline.schedule_v import dualpipe_v, v_half, v_min, zb_v
from onecard.pipeline.timing import Span, Timeline, Times, simulate

__all__ = [
    "Action", "Meter", "Report", "Runner", "Schedule", "Sizes", "Span", "Timeline", "Times",
    "naive", "gpipe", "one_f_one_b", "eager_one_f_one_b", "interleaved", "breadth_first", "zb_h1", "zb_h2", "zb_1p",
    "zb_2p", "zb_auto", "zb_v", "v_half", "v_min", "dualpipe_v",
    "check_schedule", "peak_memory", "read_csv", "simulate", "step_by_marks", "with_messages", "write_csv",
    "draw_figure", "draw_text", "draw_trace",
]  # fmt: skip
