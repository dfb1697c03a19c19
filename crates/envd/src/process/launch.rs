//! A process's start: what the sandbox gives to all of them and what was asked for make one request to the agent. Knows no stream.

use std::time::Duration;

use agent_api::message::{Reply, Request};
use agent_api::{ExecRequest, FsRequest, Kept, OsText, Tty, WinSize};

use super::kept::Note;
use super::messages::{Pty, Start};
use super::output::Output;
use crate::agent::{Channel, Listener, unexpected};
use crate::error::Error;
use crate::state::State;

/// Names that say who the user is; what the sandbox says of its default user is not true of another.
const OF_USER: [&str; 3] = ["HOME", "USER", "LOGNAME"];

/// A process is killed so long after its call is over: the client is told that the time is over, and not of a kill.
const MARGIN: Duration = Duration::from_millis(500);

/// Starts a process, which is killed after `limit`; what it writes is the answer.
pub(super) async fn start(
    state: &State,
    user: Option<String>,
    start: Start,
    limit: Option<Duration>,
) -> Result<Output, Error> {
    check(&start)?;
    let (mut channel, base) = state.open().await?;
    let user_differs = user.is_some() && user != base.user;
    let user = user.or(base.user);
    let cwd = directory(&mut channel, user.as_deref(), &start, &base.cwd).await?;
    let note = Note {
        config: start.process.clone(),
        pty: start.pty.is_some(),
        no_stdin: start.pty.is_none() && start.stdin == Some(false),
    };
    let tty = start.pty.as_ref().map(tty).transpose()?;
    let mut argv = vec![OsText::from(start.process.cmd)];
    argv.extend(start.process.args.into_iter().map(OsText::from));
    let request = ExecRequest {
        argv,
        env: environment(&base.env, user_differs, user.as_deref(), start.process.envs),
        cwd,
        user,
        tty,
        stdin: !note.no_stdin,
        main: false,
        detached: false,
        kept: Some(Kept {
            tag: start.tag,
            note: note.clone().write()?,
            limit_ms: limit.map(|limit| u64::try_from((limit + MARGIN).as_millis()).unwrap_or(u64::MAX)),
        }),
    };
    let command = Listener::start(channel, request).await?;
    Ok(Output::new(command, &note))
}

fn check(start: &Start) -> Result<(), Error> {
    let invalid = |text: &str| Err(Error::Invalid(text.to_owned()));
    if start.process.cmd.is_empty() {
        return invalid("`cmd` is missing: the program to start");
    }
    let mut texts = start.process.args.iter().chain([&start.process.cmd]);
    if texts.any(|text| text.contains('\0')) || start.process.envs.values().any(|text| text.contains('\0')) {
        return invalid("a program, its arguments and its environment cannot hold a zero byte");
    }
    if let Some(name) = (start.process.envs.keys()).find(|name| name.is_empty() || name.contains(['=', '\0'])) {
        return invalid(&format!("{name:?} cannot be the name of an environment variable"));
    }
    if start.tag.as_ref().is_some_and(|tag| tag.len() > Kept::MAX_TAG) {
        return invalid(&format!("a tag must not be longer than {} bytes", Kept::MAX_TAG));
    }
    Ok(())
}

fn tty(pty: &Pty) -> Result<Tty, Error> {
    Ok(Tty {
        size: size(pty)?,
        // `TERM` comes with the environment, if the client knows it.
        term: None,
    })
}

/// A terminal's size; 80 by 24 where nothing is said.
pub(super) fn size(pty: &Pty) -> Result<WinSize, Error> {
    let side = |asked: u32, default: u16| match u16::try_from(asked) {
        Ok(0) => Ok(default),
        Ok(side) => Ok(side),
        Err(_) => Err(Error::Invalid(format!(
            "a terminal cannot have a side of {asked} characters; 65535 are the most"
        ))),
    };
    Ok(WinSize {
        rows: side(pty.size.rows.0, 24)?,
        cols: side(pty.size.cols.0, 80)?,
    })
}

/// Where the process begins: the absolute path, which the agent finds of one that begins in the user's home. An image that names no
/// directory has `/`, for which E2B's templates have the user's home.
async fn directory(channel: &mut Channel, user: Option<&str>, start: &Start, base: &OsText) -> Result<OsText, Error> {
    let asked = start.process.cwd.as_deref().filter(|cwd| !cwd.is_empty());
    let path = match asked {
        Some(path) if path.starts_with('/') => return Ok(path.into()),
        Some(path) => path,
        None if base.as_bytes().is_empty() || base.as_bytes() == b"/" => "~",
        None => return Ok(base.clone()),
    };
    let stat = Request::Fs {
        user: user.map(str::to_owned),
        request: FsRequest::Stat { path: path.into() },
    };
    match channel.ask(&stat).await {
        Ok(Reply::Entry(entry)) => Ok(entry.path),
        Ok(other) => Err(unexpected(&other)),
        // No home, or no such user: the agent says which when it starts the process.
        Err(error) if error.is_missing() && asked.is_none() => Ok("/".into()),
        Err(error) if error.is_missing() => Err(Error::Invalid(format!("cwd '{path}' does not exist"))),
        Err(error) => Err(error),
    }
}

/// The sandbox's environment under what was asked for. `HOME` and `USER` are the agent's to add where they are missing.
fn environment(
    base: &[OsText],
    user_differs: bool,
    user: Option<&str>,
    asked: std::collections::BTreeMap<String, String>,
) -> Vec<OsText> {
    let name = |variable: &OsText| {
        let name = variable.as_bytes().split(|byte| *byte == b'=').next();
        name.unwrap_or_default().to_vec()
    };
    let is = |variable: &OsText, names: &[&str]| names.iter().any(|known| known.as_bytes() == name(variable));
    let mut env: Vec<OsText> = Vec::with_capacity(base.len() + asked.len() + 1);
    let kept = base.iter().filter(|variable| !(user_differs && is(variable, &OF_USER)));
    env.extend(
        kept.filter(|variable| !asked.contains_key(&*String::from_utf8_lossy(&name(variable))))
            .cloned(),
    );
    let user = user.unwrap_or("root");
    // A number has no name that is known here.
    let named = !user.bytes().all(|byte| byte.is_ascii_digit());
    if named && !env.iter().any(|variable| is(variable, &["LOGNAME"])) && !asked.contains_key("LOGNAME") {
        let name = user.split(':').next().unwrap_or_default();
        env.push(format!("LOGNAME={name}").into());
    }
    env.extend(
        asked
            .into_iter()
            .map(|(name, value)| OsText::from(format!("{name}={value}"))),
    );
    env
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(user_differs: bool, user: Option<&str>, asked: &[(&str, &str)]) -> Vec<String> {
        let base = ["PATH=/bin", "HOME=/srv", "A=1", "B=2"].map(OsText::from);
        let asked = asked
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let env = environment(&base, user_differs, user, asked.collect());
        env.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_is_asked_for_lies_over_the_sandboxs() {
        let got = env(false, Some("web"), &[("A", "x=y"), ("C", "")]);
        assert_eq!(got, ["PATH=/bin", "HOME=/srv", "B=2", "LOGNAME=web", "A=x=y", "C="]);
        assert_eq!(env(false, None, &[("LOGNAME", "me")]).last().unwrap(), "LOGNAME=me");
    }

    #[test]
    fn another_user_has_another_home() {
        let got = env(true, Some("web:www"), &[]);
        assert_eq!(got, ["PATH=/bin", "A=1", "B=2", "LOGNAME=web"]);
        assert_eq!(env(true, Some("1000"), &[]), ["PATH=/bin", "A=1", "B=2"]);
    }

    #[test]
    fn sizes_are_bounded_and_have_defaults() {
        let ask = |json: &str| size(&serde_json::from_str(json).unwrap());
        assert_eq!(ask("{}").unwrap(), WinSize { rows: 24, cols: 80 });
        let asked = ask(r#"{"size":{"cols":65535,"rows":1}}"#).unwrap();
        assert_eq!((asked.cols, asked.rows), (65535, 1));
        assert!(ask(r#"{"size":{"cols":65536,"rows":1}}"#).is_err());
    }

    #[test]
    fn what_no_process_can_have_is_refused() {
        let ask = |json: &str| check(&serde_json::from_str(json).unwrap());
        ask(r#"{"process":{"cmd":"a"}}"#).unwrap();
        for json in [
            "{}",
            r#"{"process":{"cmd":"a\u0000"}}"#,
            r#"{"process":{"cmd":"a","args":["\u0000"]}}"#,
            r#"{"process":{"cmd":"a","envs":{"A=B":"c"}}}"#,
            r#"{"process":{"cmd":"a","envs":{"":"c"}}}"#,
            r#"{"process":{"cmd":"a","envs":{"A":"\u0000"}}}"#,
            &format!(
                r#"{{"process":{{"cmd":"a"}},"tag":"{}"}}"#,
                "t".repeat(Kept::MAX_TAG + 1)
            ),
        ] {
            assert_eq!(ask(json).unwrap_err().code().name(), "invalid_argument", "{json}");
        }
    }
}
