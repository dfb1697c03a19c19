//! What `basalt cp` is given: which end is where, and what its path then means. Pure functions; nothing here copies.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

/// One end of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// A path here.
    Local(PathBuf),
    /// A tar archive on a standard stream.
    Stream,
    /// A path in a sandbox.
    Sandbox {
        /// Which.
        name: String,
        /// An absolute path.
        path: PathBuf,
    },
}

/// Reads `-`, `SANDBOX:PATH` or `PATH`. What begins with a slash or a dot is a path of this host, also with a colon in it.
pub(crate) fn parse(text: &str) -> Result<End, String> {
    if text == "-" {
        return Ok(End::Stream);
    }
    let sandbox = text.split_once(':').filter(|_| !text.starts_with(['/', '.']));
    match sandbox {
        Some((name, _)) if node_api::check_name(name).is_err() => Err(format!(
            "`{name}` is no sandbox's name: write SANDBOX:PATH, or ./PATH for a path with a colon"
        )),
        Some((_, "")) => Err("a path in the sandbox is missing: write SANDBOX:PATH, such as web:/etc".into()),
        // Without a slash it is one below the root, as for docker.
        Some((name, path)) => Ok(End::Sandbox {
            name: name.to_owned(),
            path: if path.starts_with('/') {
                path.into()
            } else {
                format!("/{path}").into()
            },
        }),
        None if text.is_empty() => Err("an empty path names nothing".into()),
        None => Ok(End::Local(text.into())),
    }
}

/// What is copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    /// Its last name, if it has one.
    pub(crate) name: Option<PathBuf>,
    /// Only what is in it is meant: its path ends with `/.`, or it has no name.
    pub(crate) contents: bool,
    /// It is a directory.
    pub(crate) directory: bool,
}

impl Source {
    pub(crate) fn new(path: &Path, directory: bool) -> Self {
        let name = path.file_name().map(PathBuf::from);
        Self {
            contents: name.is_none() || ends_with(path, "/."),
            name,
            directory,
        }
    }
}

/// What is at a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum There {
    Nothing,
    Directory,
    Other,
}

/// Where a tree goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// It becomes this path.
    Root(PathBuf),
    /// What is in it goes into this directory.
    Into(PathBuf),
}

fn ends_with(path: &Path, end: &str) -> bool {
    path.as_os_str().as_encoded_bytes().ends_with(end.as_bytes())
}

/// Decides as docker and podman do what `source` becomes at `path`.
pub(crate) fn place(source: &Source, path: &Path, there: There) -> Result<Place> {
    let shown = path.display();
    match there {
        There::Directory if source.contents && source.directory => Ok(Place::Into(path.to_owned())),
        There::Directory => match &source.name {
            Some(name) => Ok(Place::Root(path.join(name))),
            None => Ok(Place::Into(path.to_owned())),
        },
        There::Other if source.directory => {
            bail!("{shown} is a file, and a directory cannot become one: copy to another place, or remove it first")
        }
        There::Other if ends_with(path, "/") || ends_with(path, "/.") => {
            bail!("{shown} is a file and no directory: leave the slash at the end out to replace it")
        }
        There::Nothing if !source.directory && (ends_with(path, "/") || ends_with(path, "/.")) => {
            bail!(
                "{shown} is not there: make the directory first, or leave the slash at the end out to copy to that name"
            )
        }
        // Components leave a slash at the end out.
        There::Nothing | There::Other => Ok(Place::Root(path.components().collect())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_told_apart() {
        let sandbox = |name: &str, path: &str| {
            Ok(End::Sandbox {
                name: name.into(),
                path: path.into(),
            })
        };
        assert_eq!(parse("-"), Ok(End::Stream));
        assert_eq!(parse("web:/etc"), sandbox("web", "/etc"));
        assert_eq!(parse("web:etc/x:y"), sandbox("web", "/etc/x:y"));
        assert_eq!(parse("/a:b"), Ok(End::Local("/a:b".into())));
        assert_eq!(parse("./a:b"), Ok(End::Local("./a:b".into())));
        assert_eq!(parse("a"), Ok(End::Local("a".into())));
        assert!(parse("").is_err());
        assert!(parse("web:").unwrap_err().contains("web:/etc"));
        assert!(parse("a/b:c").unwrap_err().contains("./PATH"));
        assert!(parse(":/x").unwrap_err().contains("SANDBOX:PATH"));
    }

    /// The table of docker's manual, "docker cp".
    #[test]
    fn the_table_of_places() {
        let file = Source::new(Path::new("/s/f"), false);
        let directory = Source::new(Path::new("/s/d"), true);
        let contents = Source::new(Path::new("/s/d/."), true);
        let at = |source: &Source, path: &str, there| place(source, Path::new(path), there);
        let root = |path: &str| Place::Root(path.into());
        let into = |path: &str| Place::Into(path.into());
        assert_eq!(at(&file, "/t", There::Nothing).unwrap(), root("/t"));
        assert!(
            at(&file, "/t/", There::Nothing)
                .unwrap_err()
                .to_string()
                .contains("make the directory first")
        );
        assert_eq!(at(&file, "/t", There::Other).unwrap(), root("/t"));
        assert!(at(&file, "/t/", There::Other).is_err());
        assert_eq!(at(&file, "/t", There::Directory).unwrap(), root("/t/f"));
        assert_eq!(at(&directory, "/t", There::Nothing).unwrap(), root("/t"));
        assert_eq!(at(&directory, "/t/", There::Nothing).unwrap(), root("/t"));
        assert!(
            at(&directory, "/t", There::Other)
                .unwrap_err()
                .to_string()
                .contains("is a file")
        );
        assert_eq!(at(&directory, "/t", There::Directory).unwrap(), root("/t/d"));
        assert_eq!(at(&contents, "/t", There::Nothing).unwrap(), root("/t"));
        assert_eq!(at(&contents, "/t", There::Directory).unwrap(), into("/t"));
        assert!(at(&contents, "/t", There::Other).is_err());
        for whole in [".", "/", "..", "/x/.."] {
            let source = Source::new(Path::new(whole), true);
            assert_eq!(at(&source, "/t", There::Directory).unwrap(), into("/t"), "{whole}");
        }
    }
}
