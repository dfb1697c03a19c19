//! A check that is made again and again until it is content, while another command may run on.

use std::thread;
use std::time::{Duration, Instant};

use agent_api::ExitStatus;

use crate::{Ended, Error, Step};

/// Between two questions whether it is ready.
pub const PAUSE: Duration = Duration::from_millis(500);

/// Runs the check until it ends with 0; how long that took. `start` starts a command of which nothing is shown. `left` runs on meanwhile: if
/// it fails, so does this. What `go_on` says is asked for now and then, and ends it.
///
/// # Errors
/// The check was not content within the limit, what was left has failed, or `start` or `go_on` has.
pub fn wait_until_ready<E: From<Error>>(
    check: &str,
    limit: Duration,
    left: Option<(&str, &Step)>,
    mut start: impl FnMut(&str) -> Result<Step, E>,
    go_on: impl Fn() -> Result<(), E>,
) -> Result<Duration, E> {
    let begun = Instant::now();
    let end = begun + limit;
    // One that has ended well has left something running, or there is nothing to wait for but the check.
    let mut left = left;
    loop {
        let asked = start(check)?;
        let answer = loop {
            let answer = asked.ended(Some(PAUSE))?;
            go_on()?;
            if left_alone(left)? {
                left = None;
            }
            if answer.is_some() || Instant::now() >= end {
                break answer;
            }
        };
        match &answer {
            Some(answer) if answer.status == ExitStatus::Code(0) => return Ok(begun.elapsed()),
            _ if Instant::now() >= end => {
                let (check, said) = (check.to_owned(), said(answer.as_ref()));
                return Err(Error::NotReady { check, limit, said }.into());
            }
            _ => (),
        }
        thread::sleep(PAUSE);
    }
}

/// The command that may run on has ended; that it has failed ends the build.
fn left_alone(left: Option<(&str, &Step)>) -> Result<bool, Error> {
    let Some((command, step)) = left else { return Ok(false) };
    match step.ended(Some(Duration::ZERO))? {
        Some(ended) => Error::unless_succeeded(command, &ended).map(|()| true),
        None => Ok(false),
    }
}

fn said(answer: Option<&Ended>) -> String {
    let Some(answer) = answer else {
        return "did not end".to_owned();
    };
    let how = match answer.status {
        ExitStatus::Code(code) => format!("ended with code {code} the last time"),
        ExitStatus::Signal(number) => format!("was ended by signal {number} the last time"),
    };
    match answer.words.trim() {
        "" => how,
        words => format!("{how} and said: {words}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{connect, script};

    fn start(text: &str) -> Result<Step, Error> {
        Step::start(connect(), script(text), |_, _| Ok(()))
    }

    fn wait(check: &str, limit: u64, left: Option<(&str, &Step)>) -> Result<Duration, Error> {
        wait_until_ready(check, Duration::from_millis(limit), left, start, || Ok(()))
    }

    #[test]
    fn it_is_asked_again_until_it_is_content() {
        let file = std::env::temp_dir().join(format!("ready-{}", std::process::id()));
        let server = format!("sleep 1; touch {0}; sleep 100", file.display());
        let left = start(&server).unwrap();
        let waited = wait(
            &format!("[ -e {} ]", file.display()),
            20_000,
            Some((server.as_str(), &left)),
        );
        std::fs::remove_file(file).unwrap();
        assert!(waited.unwrap() >= PAUSE);
    }

    #[test]
    fn what_is_never_ready_and_what_fails_meanwhile_is_told() {
        let told = wait("echo no; exit 4", 1200, None).unwrap_err().to_string();
        assert!(
            told.contains("code 4 the last time") && told.contains("said: no"),
            "{told}"
        );
        let told = wait("sleep 100", 700, None).unwrap_err().to_string();
        assert!(told.contains("did not end"), "{told}");
        let left = start("sleep 0.2; exit 9").unwrap();
        let told = wait("false", 20_000, Some(("server", &left))).unwrap_err();
        assert!(matches!(told, Error::Code { code: 9, .. }), "{told}");
        let stopped = wait_until_ready("false", PAUSE * 100, None, start, || Err(Error::Lost));
        assert!(matches!(stopped, Err(Error::Lost)));
    }
}
