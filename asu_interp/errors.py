"""Every error a user can cause, one class per thing that was wrong."""


class AsuError(ValueError):
    """Bad input: the message says what was wrong, where, what is allowed and what to do."""


class ModelError(AsuError):
    """A model that cannot be found, loaded, trusted or edited."""


class FactsError(AsuError):
    """Facts that cannot be read, or sets of them that make no sense."""


class HeadError(AsuError):
    """A head, or a set of heads, that this model does not have."""


class TemperatureError(AsuError):
    """A temperature that is not finite and positive, or has the wrong shape."""


class RunError(AsuError):
    """A run directory that cannot be used, or a run that had to stop."""
