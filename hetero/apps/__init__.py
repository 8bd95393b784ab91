"""What people do with the library: plans, cards, sizes, exports, services, commands."""
