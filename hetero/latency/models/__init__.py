"""Models of step times: fitted lines, the roofline, mixtures of experts."""
