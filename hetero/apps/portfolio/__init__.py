"""The arena: every planner and router on the same cluster, model, workload, prices and latencies.

``case`` says what is asked, ``entry`` what a planner answers, ``assumptions`` what all are played
with, ``bound`` what none exceeds; one module per family of planners turns that family's own plans
into entries, ``score`` plays entries, and ``portfolio`` tries the planners that apply, improves the
best of them and returns it with the evidence.
"""
