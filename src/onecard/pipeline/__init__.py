"""Pipeline schedules as data: made, proved, priced and drawn before anything runs.

    from onecard import pipeline

    schedule = pipeline.one_f_one_b(ranks=4, microbatches=8)
    print(pipeline.check_schedule(schedule, pipeline.Times(18.5, 18.1, 9.3, 0.6)))
    print(pipeline.draw_text(schedule))

``Runner`` runs any of them; ``onecard.fleet.PipelineLayer`` makes stages of a list of layers.
"""

from onecard.pipeline.run.marks import MarkedRunner, step_by_marks
from onecard.pipeline.run.meter import Meter
from onecard.pipeline.run.runner import Runner
from onecard.pipeline.schedule import modes
from onecard.pipeline.schedule.action import Action, Schedule
from onecard.pipeline.schedule.check import check_schedule
from onecard.pipeline.schedule.csv_file import read_csv, write_csv
from onecard.pipeline.schedule.orders import (
    breadth_first,
    eager_one_f_one_b,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from onecard.pipeline.schedule.schedule_auto import zb_1p, zb_2p, zb_auto
from onecard.pipeline.schedule.schedule_memory import Sizes, peak_memory
from onecard.pipeline.schedule.schedule_messages import with_messages
from onecard.pipeline.schedule.schedule_report import ScheduleReport as Report
from onecard.pipeline.schedule.schedule_v import dualpipe_v, v_half, v_min, zb_v
from onecard.pipeline.schedule.timeline_pictures import draw_figure, draw_text, draw_trace
from onecard.pipeline.schedule.timing import Span, Timeline, Times, simulate

__all__ = [
    "Action", "MarkedRunner", "Meter", "Report", "Runner", "Schedule", "Sizes", "Span", "Timeline", "Times",
    "naive", "gpipe", "one_f_one_b", "eager_one_f_one_b", "interleaved", "breadth_first", "zb_h1", "zb_h2", "zb_1p",
    "zb_2p", "zb_auto", "zb_v", "v_half", "v_min", "dualpipe_v",
    "check_schedule", "peak_memory", "read_csv", "simulate", "step_by_marks", "with_messages", "write_csv",
    "draw_figure", "draw_text", "draw_trace", "modes",
]  # fmt: skip
