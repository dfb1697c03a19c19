//! The library as programs have it, linked from what cargo has built, and a program of C beside it. Knows no server.
#![allow(dead_code, unreachable_pub, reason = "each test uses some of it")]

pub mod chain;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The library and the program, in a directory.
pub struct Linked(tempfile::TempDir);

impl Linked {
    /// With the program that is made of that file.
    pub fn new(source: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let generated = root.join("src/generated");
        let archive = archive();
        let library = directory.path().join("libbasalt_cuda.so");
        let mut link = Command::new("cc");
        link.arg("-shared")
            .arg("-o")
            .arg(&library)
            .arg(generated.join("symbols.s"));
        link.arg(format!(
            "-Wl,--version-script={},--gc-sections,-z,defs",
            generated.join("symbols.map").display()
        ));
        run(link.arg(archive).args(["-lgcc_s", "-lpthread", "-ldl"]));
        for file in std::fs::read_to_string(generated.join("files.txt")).unwrap().lines() {
            std::os::unix::fs::symlink("libbasalt_cuda.so", directory.path().join(file)).unwrap();
        }
        let linked = Self(directory);
        let libraries = [
            "libcudart.so.13",
            "libcublas.so.13",
            "libcublasLt.so.13",
            "libcudnn.so.9",
            "libcurand.so.10",
            "libcuda.so.1",
        ];
        linked.compile(source, "program", &libraries);
        linked
    }

    /// Another program, linked with the library by these names: where it is.
    pub fn compile(&self, source: &str, name: &str, libraries: &[&str]) -> PathBuf {
        let program = self.0.path().join(name);
        let mut compile = Command::new("cc");
        compile.args(["-O1", "-Wall", "-Werror", "-o"]).arg(&program);
        compile.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(source));
        compile.arg("-L").arg(self.0.path()).arg("-Wl,--no-as-needed");
        compile.args(libraries.iter().map(|library| format!("-l:{library}")));
        run(compile.arg("-ldl"));
        program
    }

    /// Where it looks for a server.
    pub fn socket(&self) -> PathBuf {
        self.0.path().join("accel.sock")
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Runs the program: what it says on stderr.
    pub fn program(&self, what: &str, environment: &[(&str, &str)]) -> String {
        String::from_utf8(self.run(what, environment).stderr).unwrap()
    }

    /// The same, with all that it says.
    pub fn run(&self, what: &str, environment: &[(&str, &str)]) -> Output {
        run(self.command(&[what]).envs(environment.iter().copied()))
    }

    /// The same with several words, however it ends.
    pub fn run_with(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(self.0.path().join("program"));
        command.args(words).env("LD_LIBRARY_PATH", self.0.path());
        command
            .env("BASALT_ACCEL_SOCKET", self.socket())
            .env("BASALT_ACCEL_DEBUG", "1");
        command
    }
}

/// The library that cargo has built for this test: its name has a sum in it, and others are of other settings and older.
fn archive() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let files = std::fs::read_dir(own.parent().unwrap())
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let is_one = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libbasalt_cuda") && name.ends_with(".a")
    };
    let newest = files
        .filter(is_one)
        .max_by_key(|path| path.metadata().unwrap().modified().unwrap());
    newest.expect("it is built with this test")
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    output
}
