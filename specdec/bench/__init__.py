"""The benchmark: drafters and policies against each other and against their peers, honestly timed.

`config` expands a YAML grid into rows, `questions` reads what is asked, `methods` times one answer,
`runner` asks every question of every row and keeps the results, `summary` makes figures of them, and
`report` shows those to people.
"""
