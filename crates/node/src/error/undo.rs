//! What went wrong, where taking back what had been done goes wrong as well: the first error is the reason, the second a remark. Knows no
//! operation.

use crate::Error;

impl Error {
    /// What was made, after what it was made with was taken away, or was not.
    pub(crate) fn first_of<T>(made: Result<T, Self>, taken: Result<(), Self>) -> Result<T, Self> {
        match made {
            Ok(made) => taken.map(|()| made),
            Err(error) => Err(error.after_undo(taken)),
        }
    }

    /// This error, after what had been done before it was taken back, or was not.
    pub(crate) fn after_undo(self, undone: Result<(), Self>) -> Self {
        match undone {
            Ok(()) => self,
            Err(undo) => Self::NotTakenBack {
                first: Box::new(self),
                undo: Box::new(undo),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use node_api::ErrorKind;

    use super::*;

    #[test]
    fn the_first_error_is_told_first_and_decides() {
        let first = || Error::NoSnapshot("base".into());
        assert!(matches!(first().after_undo(Ok(())), Error::NoSnapshot(_)));
        let none: Result<(), _> = Error::first_of(Err(first()), Err(Error::Disk("it is full".into())));
        assert!(matches!(none, Err(Error::NotTakenBack { .. })));
        assert!(matches!(Error::first_of(Ok(7), Ok(())), Ok(7)));
        let both = first().after_undo(Err(Error::Disk("it is full".into())));
        let told = both.for_api();
        assert!(
            told.message.starts_with("there is no snapshot `base`"),
            "{}",
            told.message
        );
        assert!(
            told.message.contains("could not be taken back: the writable disk"),
            "{}",
            told.message
        );
        assert_eq!(
            (told.kind, told.exit_code, both.reason()),
            (ErrorKind::NotFound, 125, "not-found")
        );
    }
}
