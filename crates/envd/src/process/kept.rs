//! The processes that there are: commands that the agent keeps, each with a note of what it was started with. Knows no stream.

use agent_api::message::{MAX_KEPT, MAX_KEPT_TEXT, Reply, Request};
use agent_api::{Kept, KeptCommand};
use serde::{Deserialize, Serialize};

use super::messages::{Listed, ProcessConfig, ProcessInfo, Which};
use crate::agent::{Channel, Listener, Sender, unexpected};
use crate::connect::json;
use crate::error::Error;
use crate::memory::Held;
use crate::state::State;

/// What is noted of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct Note {
    /// What it was started with.
    pub(super) config: ProcessConfig,
    /// It has a terminal.
    pub(super) pty: bool,
    /// It has no standard input.
    #[serde(rename = "noStdin")]
    pub(super) no_stdin: bool,
}

impl Note {
    /// As the agent keeps it. What does not fit is left out, the environment first.
    pub(super) fn write(mut self) -> Result<String, Error> {
        for forget in [
            |_: &mut ProcessConfig| {},
            |config: &mut ProcessConfig| config.envs.clear(),
            |config: &mut ProcessConfig| config.args.clear(),
            |config: &mut ProcessConfig| *config = ProcessConfig::default(),
        ] {
            forget(&mut self.config);
            let note = json::write(&self)?;
            if note.len() <= Kept::MAX_NOTE {
                return String::from_utf8(note).map_err(|error| Error::Invalid(error.to_string()));
            }
        }
        Ok(String::new())
    }

    /// What was noted of a command; nothing of one that somebody else keeps.
    fn of(command: &KeptCommand) -> Self {
        serde_json::from_str(&command.kept.note).unwrap_or_default()
    }
}

/// What is noted of a command that somebody else starts and keeps: as if it had been asked for as the SDKs ask for theirs, without input.
pub fn note_of_shell(command: &str, cwd: &str) -> String {
    let note = Note {
        config: ProcessConfig {
            cmd: "/bin/bash".to_owned(),
            args: ["-l", "-c", command].map(str::to_owned).to_vec(),
            cwd: Some(cwd.to_owned()),
            ..ProcessConfig::default()
        },
        pty: false,
        no_stdin: true,
    };
    // One that cannot be written is the note of one of which nothing is known.
    note.write().unwrap_or_default()
}

/// All of them.
pub(super) async fn list(state: &State) -> Result<Listed, Error> {
    let (mut channel, _) = state.open().await?;
    let info = |command: KeptCommand| ProcessInfo {
        config: Note::of(&command).config,
        pid: command.pid,
        tag: command.kept.tag,
    };
    let (commands, held) = ask(state, &mut channel).await?;
    Ok(Listed {
        processes: commands.into_iter().map(info).collect(),
        _held: held,
    })
}

/// All that the agent keeps, and the memory that it takes.
async fn ask(state: &State, channel: &mut Channel) -> Result<(Vec<KeptCommand>, Held), Error> {
    let mut reply = channel.ask(&Request::ListKept).await?;
    let mut all = Vec::new();
    let mut held = state.memory.nothing();
    let mut text = 0;
    loop {
        let Reply::Kept { commands, more } = reply else {
            return Err(unexpected(&reply));
        };
        text += commands.iter().map(|command| command.kept.text_len()).sum::<usize>();
        held.grow_to(text)?;
        all.extend(commands);
        if all.len() > MAX_KEPT || text > MAX_KEPT_TEXT {
            return Err(Error::Agent("it names more processes than it can keep".to_owned()));
        }
        if !more {
            return Ok((all, held));
        }
        reply = channel.answer().await?;
    }
}

/// Finds the process that is meant: its id, what was noted of it, and the connection by which it was found.
async fn find(state: &State, which: Which) -> Result<(Channel, u32, Note), Error> {
    let (mut channel, _) = state.open().await?;
    let (commands, _held) = ask(state, &mut channel).await?;
    // Of several with the same tag the one that was started last.
    let found = commands.into_iter().rfind(|command| match &which {
        Which::Pid(pid) => command.pid == *pid,
        Which::Tag(tag) => command.kept.tag.as_ref() == Some(tag),
    });
    match (found, which) {
        (Some(command), _) => Ok((channel, command.pid, Note::of(&command))),
        (None, Which::Pid(pid)) => Err(Error::NoProcess(format!("pid {pid}"))),
        (None, Which::Tag(tag)) => Err(Error::NoProcess(format!("tag {tag}"))),
    }
}

/// Listens to the process that is meant.
pub(super) async fn listen(state: &State, which: Which) -> Result<(Listener, Note), Error> {
    let (channel, pid, note) = find(state, which).await?;
    Ok((Listener::attach(channel, pid).await?, note))
}

/// Begins to send to the process that is meant.
pub(super) async fn sender(state: &State, which: Which) -> Result<(Sender, Note), Error> {
    let (channel, pid, note) = find(state, which).await?;
    Ok((Sender::attach(channel, pid).await?, note))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(args: usize, envs: usize) -> Note {
        Note {
            config: ProcessConfig {
                cmd: "/bin/sh".to_owned(),
                args: vec!["x".repeat(args)],
                envs: [("A".to_owned(), "y".repeat(envs))].into(),
                cwd: Some("~".to_owned()),
            },
            pty: true,
            no_stdin: false,
        }
    }

    fn read(note: &str) -> Note {
        Note::of(&KeptCommand {
            pid: 1,
            kept: Kept {
                note: note.to_owned(),
                ..Kept::default()
            },
        })
    }

    #[test]
    fn what_others_keep_is_listed_as_theirs() {
        let read = Note::of(&KeptCommand {
            pid: 1,
            kept: Kept {
                note: note_of_shell("serve x", "/srv"),
                ..Kept::default()
            },
        });
        assert_eq!(read.config.args, ["-l", "-c", "serve x"]);
        assert!(read.no_stdin && !read.pty && read.config.cwd.as_deref() == Some("/srv"));
    }

    #[test]
    fn a_note_is_read_again() {
        let whole = note(3, 3);
        assert_eq!(read(&whole.clone().write().unwrap()), whole);
        // Somebody else's, or none.
        for other in ["", "{", "7", r#"{"config":{"cmd":7}}"#] {
            assert_eq!(read(other), Note::default(), "{other}");
        }
    }

    #[test]
    fn a_note_fits_and_keeps_what_matters() {
        let short = |note: Note| {
            let text = note.write().unwrap();
            assert!(text.len() <= Kept::MAX_NOTE);
            read(&text)
        };
        let kept = short(note(3, Kept::MAX_NOTE));
        assert!(kept.config.envs.is_empty() && kept.config.args.len() == 1 && kept.pty);
        let kept = short(note(Kept::MAX_NOTE, Kept::MAX_NOTE));
        assert!(kept.config.args.is_empty() && kept.config.cmd == "/bin/sh" && kept.pty);
        let mut long = note(1, 1);
        long.config.cmd = "z".repeat(Kept::MAX_NOTE);
        assert!(short(long).pty);
    }
}
