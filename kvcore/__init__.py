"""The prefix cache core: what is resident, who holds it, what goes next."""
