"""Pictures of objects of the library, and the style they share."""
