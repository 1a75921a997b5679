"""Draw timelines, planned or recorded, in the terminal and as a Chrome trace, and runs and plans as an HTML page.

>>> from shardwise.report import timeline_text
>>> from shardwise.report.panel import TerminalPanel
>>> from shardwise.schedule import Schedule, simulate
>>> schedule = Schedule.parse("rank 0: 0F0 0F1 0B0 0B1\\nrank 1: 1F0 1B0 1F1 1B1")
>>> panel = TerminalPanel("two stages", simulate(schedule, lambda rank, action: 1.0))
>>> print(timeline_text.draw([panel], width=40).plain.splitlines()[3])
rank 1  67 %  ····F0  B0  F1  B1  ····
"""
