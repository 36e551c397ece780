"""Sessions in the shape that training frameworks ask for."""
