"""The arena: every planner and router on the same cluster, model, workload, prices and latencies.

A ``Question`` says what is asked, a ``Plan`` what a planner answers, ``assumptions`` what all are
simulated with, ``bound`` what none exceeds; one module per family of planners turns what that
family returns into plans, ``score`` judges them, and ``portfolio`` tries the planners that apply,
improves the best of them and returns it with the evidence.
"""
