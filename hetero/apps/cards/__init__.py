"""Plan cards: what a fleet should run for a workload, and what that rests on.

``answer`` goes from a question to a card (:func:`hetero.plan`), ``card`` holds it, ``sections``
and ``page`` show it; ``delivery`` plays plans over seeds and draws of their step times, ``limits``
finds what binds, ``sensitivity`` what one change would do, ``infeasible`` why there is no plan, and
``difference`` compares two cards. ``sizing`` asks the other way round: the cheapest fleet for a
load.
"""
