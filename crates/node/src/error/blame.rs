//! Whose fault it is that a machine did not go on from files: theirs, which are thrown away then, its guest's, or the host's. Knows no
//! machine, only what was said of one.

use vmm_api::{ClientError, ErrorKind};

use crate::Error;

impl Error {
    /// The files that a machine was to go on from are likely to be why it did not, and not a host that is full or slow, nor this
    /// daemon's own want of something.
    pub(crate) fn is_of_files(&self) -> bool {
        match self {
            Self::Refused { cause, .. } | Self::RefusedWhile { cause, .. } => {
                matches!(cause, ClientError::Refused(refusal) if refusal.kind != ErrorKind::Host)
            }
            Self::Agent { cause, .. } => !matches!(cause, agent_api::Error::Local { .. }),
            _ => matches!(
                self,
                Self::VmmDied { .. } | Self::GuestEnded { .. } | Self::GuestSilent { .. }
            ),
        }
    }

    /// The machine that was to go on from a snapshot or a template did not come to it, whatever the cause may be.
    pub(crate) fn is_of_machine(&self) -> bool {
        let of_host = matches!(
            self,
            Self::Open { .. } | Self::File { .. } | Self::VmmTookMemory { .. } | Self::Deadline { .. }
        );
        let by_vmm = matches!(self, Self::Refused { .. } | Self::RefusedWhile { .. });
        of_host || by_vmm || matches!(self, Self::Agent { .. }) || self.is_of_files()
    }

    /// The agent is there, and will not do what it was asked.
    pub(crate) fn is_agents_refusal(&self) -> bool {
        matches!(
            self,
            Self::Agent {
                cause: agent_api::Error::Refused(_),
                ..
            }
        )
    }
}

#[cfg(test)]
mod tests {
    use vmm_api::ApiError;

    use super::*;
    use crate::Tail;

    #[test]
    fn what_the_host_lacks_is_not_the_files_fault() {
        let refused = |kind| Error::Refused {
            cause: ClientError::Refused(ApiError {
                kind,
                message: "no".into(),
            }),
            log: Tail::default(),
        };
        let agent = |cause| Error::Agent {
            during: "it was re-identified",
            cause,
            console: Tail::default(),
        };
        let local = agent_api::Error::Local {
            what: "a file",
            source: std::io::ErrorKind::OutOfMemory.into(),
        };
        let closed = Error::Refused {
            cause: ClientError::Malformed("?".into()),
            log: Tail::default(),
        };
        for (error, of_files) in [
            (refused(ErrorKind::Invalid), true),
            (refused(ErrorKind::Host), false),
            (closed, false),
            (agent(agent_api::Error::Refused("no".into())), true),
            (agent(local), false),
        ] {
            // Whatever it is, the sandbox can boot.
            assert_eq!(
                (error.is_of_files(), error.is_of_machine()),
                (of_files, true),
                "{error}"
            );
        }
    }
}
