"""How many machines: sizing, the day curve, spot prices, failures and spare."""
