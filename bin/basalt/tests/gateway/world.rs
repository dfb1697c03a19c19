//! A gateway in a process of its own, and the program that asks it.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use serde_json::Value;

use crate::program::{Running, Terminal, text};

pub(crate) struct World {
    directory: tempfile::TempDir,
    serves: Child,
    says: BufReader<ChildStdout>,
    pub(crate) url: String,
    /// The API's name, by TLS.
    pub(crate) by_names: String,
    pub(crate) key: String,
    pub(crate) authority: PathBuf,
}

impl World {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut serves = Command::new(std::env::current_exe().unwrap())
            .arg("--serve")
            .arg(directory.path().join("state"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut says = BufReader::new(serves.stdout.take().unwrap());
        let mut line = String::new();
        says.read_line(&mut line).unwrap();
        let told: Value = serde_json::from_str(&line).unwrap();
        let of = |name: &str| told[name].as_str().unwrap().to_owned();
        let authority = directory.path().join("authority.pem");
        fs::write(&authority, of("authority")).unwrap();
        Self {
            url: of("url"),
            by_names: of("by_names"),
            key: of("key"),
            authority,
            serves,
            says,
            directory,
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The gateway is gone from one moment to the next, as after a power cut.
    pub(crate) fn vanish(&mut self) {
        self.serves.kill().unwrap();
        self.serves.wait().unwrap();
    }

    /// What sandboxes' commands have written from now on.
    pub(crate) fn set_log(&mut self, text: &str) {
        writeln!(self.serves.stdin.as_mut().unwrap(), "{text}").unwrap();
        let mut line = String::new();
        self.says.read_line(&mut line).unwrap();
        assert_eq!(line, "done\n");
    }

    /// The program, which is to ask this gateway.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_basalt"));
        command
            .args(args)
            .env("BASALT_HOST", &self.url)
            .env("BASALT_API_KEY", &self.key)
            // Neither of the two is to be looked for.
            .env("BASALT_ENGINE", "none")
            .env("BASALT_STATE", self.path("no-daemon"))
            .env_remove("E2B_API_KEY")
            .env_remove("SSL_CERT_FILE")
            .stdin(Stdio::null());
        command
    }

    pub(crate) fn verb(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// A verb that must be done; what it prints.
    #[track_caller]
    pub(crate) fn done(&self, args: &[&str]) -> String {
        let output = self.verb(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    #[track_caller]
    pub(crate) fn json(&self, args: &[&str]) -> Value {
        let args: Vec<&str> = ["--json"].iter().chain(args).copied().collect();
        serde_json::from_str(&self.done(&args)).unwrap()
    }

    /// A verb that must fail with this code and say all of this.
    #[track_caller]
    pub(crate) fn fails(&self, args: &[&str], code: i32, says: &[&str]) {
        failed(&self.verb(args), code, says);
    }

    /// A sandbox of the template `base` that is called so.
    #[track_caller]
    pub(crate) fn make(&self, name: &str) -> String {
        self.done(&["run", "-d", "--name", name, "base"]).trim().to_owned()
    }

    /// The program in progress, with pipes.
    pub(crate) fn start(&self, args: &[&str]) -> Running {
        let mut command = self.command(args);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        Running(command.spawn().unwrap())
    }

    pub(crate) fn start_on_terminal(&self, args: &[&str], rows: u16, cols: u16) -> Terminal {
        Terminal::start(self.command(args), rows, cols)
    }
}

#[track_caller]
pub(crate) fn failed(output: &Output, code: i32, says: &[&str]) {
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{told}");
    for sentence in says {
        assert!(told.contains(sentence), "`{sentence}` is not in: {told}");
    }
    assert!(!told.contains('\x1b'), "{told:?}");
}

impl Drop for World {
    fn drop(&mut self) {
        // It may have vanished.
        drop(self.serves.kill());
        drop(self.serves.wait());
    }
}
