"""Methods besides DeCoRe's own, scoring, and the settings of all as programs have them."""
