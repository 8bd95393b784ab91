"""How many machines: sizing, the day curve, autoscaling, spot prices, failures and spare."""
