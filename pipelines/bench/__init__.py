"""How fast this library is, measured where it runs; the tests never time anything."""
