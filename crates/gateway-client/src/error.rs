//! What can go wrong between this client and a server, each with what to do about it.

use std::time::Duration;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// It names no server.
    #[error(
        "`{url}` is no address of a gateway: {problem}; write https://api.DOMAIN, or http://127.0.0.1:3000 on its own machine"
    )]
    BadUrl {
        /// What was given.
        url: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// It can be no key.
    #[error("the API key has characters that no key has: copy it again from `basalt-gateway keys create`")]
    BadKey,
    /// Nobody answers.
    #[error("{server} does not answer ({problem}): is the gateway started there, and is the address right?")]
    Unreachable {
        /// Whom was asked.
        server: String,
        /// Why not.
        problem: String,
    },
    /// Its certificate is of nobody who is trusted.
    #[error(
        "the certificate of {server} is not trusted ({problem}): set SSL_CERT_FILE to a file with its authority, which `basalt-gateway ca` \
         prints on its machine; there `eval \"$(basalt env)\"` sets it"
    )]
    Untrusted {
        /// Whom was asked.
        server: String,
        /// What is wrong with the certificate.
        problem: String,
    },
    /// An answer broke off, or did not come.
    #[error("the connection to {server} broke ({problem})")]
    Broken {
        /// Whom was asked.
        server: String,
        /// How.
        problem: String,
    },
    /// It says 401.
    #[error(
        "{server} does not take the API key ({message}): set BASALT_API_KEY to one of its keys, as `basalt-gateway keys create` prints them"
    )]
    Unauthorized {
        /// Whom was asked.
        server: String,
        /// What it says.
        message: String,
    },
    /// It says 429.
    #[error("{message}; {}", again(*after))]
    TooMany {
        /// What it says.
        message: String,
        /// When to ask again, if it said so.
        after: Option<Duration>,
    },
    /// It says another status of failure.
    #[error("{message} (status {status}){}", hint(*status))]
    Refused {
        /// The status.
        status: u16,
        /// What it says.
        message: String,
    },
    /// A call of port 49983 failed by a stream's last message.
    #[error("{message} ({code})")]
    Call {
        /// Connect's code, such as `not_found`.
        code: String,
        /// What it says.
        message: String,
    },
    /// It does not speak this API.
    #[error("{server} has answered what no gateway answers ({problem}): does the address lead to one?")]
    NoGateway {
        /// Whom was asked.
        server: String,
        /// What was wrong with it.
        problem: String,
    },
    /// What was to be sent could not be read here.
    #[error("what is sent could not be read")]
    Local(#[source] std::io::Error),
}

impl Error {
    /// There is no such thing.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        match self {
            Self::Refused { status, .. } => *status == 404,
            Self::Call { code, .. } => code == "not_found",
            _ => false,
        }
    }
}

fn again(after: Option<Duration>) -> String {
    match after {
        Some(after) => format!("try again in {} s", after.as_secs()),
        None => "sandboxes or a quota have to be freed first, or somebody raises it (`basalt-gateway tenants set`)"
            .to_owned(),
    }
}

fn hint(status: u16) -> &'static str {
    match status {
        403 => "; whoever operates the gateway's node can do it there",
        404 => "; `basalt ps`, `basalt template ls` and `basalt snapshot ls` list what this key has",
        501 => "; `basalt` on the gateway's own machine may be able to",
        502..=504 => "; try again, and look at the gateway's log if it stays so",
        507 => "; remove sandboxes, snapshots or files, or try again later",
        500 => "; the gateway's log has more of it under that number",
        _ => "",
    }
}

/// Text of a server as a terminal may show it.
pub(crate) fn plain(text: &str) -> String {
    const MOST: usize = 2000;
    let shown = text.chars().map(|char| if char.is_control() { ' ' } else { char });
    shown.take(MOST).collect::<String>().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_servers_has_no_control_characters_and_an_end() {
        assert_eq!(plain("a\x1b[31mb\n"), "a [31mb");
        assert_eq!(plain(&"x".repeat(5000)).len(), 2000);
    }

    #[test]
    fn who_has_to_wait_is_told_how_long() {
        let error = |after| Error::TooMany {
            message: "too many requests".to_owned(),
            after,
        };
        assert_eq!(
            error(Some(Duration::from_secs(3))).to_string(),
            "too many requests; try again in 3 s"
        );
        assert!(error(None).to_string().contains("quota"));
    }
}
