//! How a process ended, in the words that envd has of Go's standard library (`os.ProcessState.String`, `syscall.Signal.String`), which the
//! SDKs show. Knows no agent.

use agent_api::ExitStatus;

use super::messages::End;

impl From<ExitStatus> for End {
    fn from(status: ExitStatus) -> Self {
        match status {
            ExitStatus::Code(code) => {
                let status = format!("exit status {code}");
                Self {
                    exit_code: i32::from(code),
                    exited: true,
                    error: (code != 0).then(|| status.clone()),
                    status,
                }
            }
            ExitStatus::Signal(number) => {
                let status = match signal(number) {
                    Some(name) => format!("signal: {name}"),
                    None => format!("signal: signal {number}"),
                };
                Self {
                    exit_code: -1,
                    exited: false,
                    error: Some(status.clone()),
                    status,
                }
            }
        }
    }
}

/// A signal's name.
fn signal(number: u8) -> Option<&'static str> {
    Some(match number {
        1 => "hangup",
        2 => "interrupt",
        3 => "quit",
        4 => "illegal instruction",
        5 => "trace/breakpoint trap",
        6 => "aborted",
        7 => "bus error",
        8 => "floating point exception",
        9 => "killed",
        10 => "user defined signal 1",
        11 => "segmentation fault",
        12 => "user defined signal 2",
        13 => "broken pipe",
        14 => "alarm clock",
        15 => "terminated",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_told_as_go_does() {
        let end = |status| {
            let end = End::from(status);
            (end.exit_code, end.exited, end.status, end.error)
        };
        let text = |text: &str| text.to_owned();
        assert_eq!(end(ExitStatus::Code(0)), (0, true, text("exit status 0"), None));
        assert_eq!(
            end(ExitStatus::Code(3)),
            (3, true, text("exit status 3"), Some(text("exit status 3")))
        );
        assert_eq!(
            end(ExitStatus::Signal(9)),
            (-1, false, text("signal: killed"), Some(text("signal: killed")))
        );
        assert_eq!(end(ExitStatus::Signal(31)).2, "signal: signal 31");
    }
}
