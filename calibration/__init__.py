"""Measuring real training steps on a GPU, and fitting what cannot be known without one.

Here are the probe that runs a job's steps in a fresh process (`probe`, `measure`), campaigns of such runs
(`campaign`, `limits`), the line through measured over replayed peaks (`fit`), and the files (`record`,
`observation_file`, `history_file`) that the planner then reads; `commands` puts them together for the command
line. The planner itself needs nothing from this package.

Nothing here has run on a GPU yet: the probe's figures on CUDA are untried, and the only tables that ship are
fitted from figures that others published.
"""
