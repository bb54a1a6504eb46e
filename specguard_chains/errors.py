"""The errors that users of the package can catch; every message names the value and the remedy."""


class SpecGuardError(Exception):
    """Base of every error that the package raises on purpose."""


class ConfigurationError(SpecGuardError, ValueError):
    """A setting has a value that cannot work."""


class ContextOverflowError(SpecGuardError):
    """The text is longer than a model's context window."""


class StatesUnavailableError(SpecGuardError):
    """An engine cannot show the hidden states that a value head needs."""


class AttentionUnavailableError(SpecGuardError):
    """Grounding was asked of an engine that does not give attention."""


class ModelIntegrityError(SpecGuardError):
    """A model file is damaged or is not the file that it should be."""


class ModelNotFoundError(SpecGuardError, FileNotFoundError):
    """A model file is neither here nor obtainable."""


class EngineError(SpecGuardError):
    """An engine failed while it worked."""


class ServerError(EngineError):
    """A model server cannot be reached, refuses a request, or answers what makes no sense."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status of the refusal, if it is one."""


class ServerAuthenticationError(ServerError):
    """A model server does not accept the API key."""


class ServerTimeoutError(ServerError, TimeoutError):
    """A model server took longer for one request than it may."""


class DecodingCancelled(SpecGuardError):
    """The caller stopped the decoding."""


class DecodingTimeoutError(DecodingCancelled, TimeoutError):
    """An answer took longer than the caller's timeout."""


class QueueFullError(SpecGuardError):
    """More requests wait for a model than may."""


class CalibrationError(SpecGuardError):
    """Bounds or a threshold cannot be calibrated from the given data."""


class EvaluationError(SpecGuardError):
    """Problems, answers or results cannot be read, checked or compared."""
