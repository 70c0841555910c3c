"""How stretches of a fragment become bytes, and bytes become them again."""
