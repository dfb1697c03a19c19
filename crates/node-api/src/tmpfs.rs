//! A file system in a sandbox's memory, as people write it. Does not know how it is mounted.

use std::str::FromStr;

use base::ByteSize;
use serde::{Deserialize, Serialize};

/// Permission bits of one for which none were given: those of `/tmp`.
const DEFAULT_MODE: u32 = 0o1777;

/// A tmpfs at a path of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tmpfs {
    /// Absolute, without `.` and `..`.
    pub path: String,
    /// The most that it holds; half of the guest's memory when not given.
    pub size: Option<ByteSize>,
    /// Permission bits of its root.
    pub mode: u32,
    /// Programs in it can be executed.
    pub exec: bool,
}

/// Why a text is no tmpfs.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum TmpfsError {
    /// Not a path of the guest.
    #[error("`{0}` cannot be a tmpfs's place: write an absolute path below /, without `.` and `..`, such as /run")]
    Path(String),
    /// An unknown option.
    #[error("`{0}` is no option of a tmpfs: there are size=SIZE, mode=OCTAL, exec and noexec")]
    Option(String),
    /// A size of nothing, or none at all.
    #[error("`{0}` is no size of a tmpfs: write one of 4k or more, such as size=64M")]
    Size(String),
    /// Not an octal mode.
    #[error("`{0}` is no mode: write octal digits, 0 to 7777, such as mode=1777")]
    Mode(String),
    /// The same place twice.
    #[error("{0} is to be a tmpfs twice: leave one of them out")]
    Twice(String),
}

impl Tmpfs {
    /// Checks what can be told from the data alone.
    ///
    /// # Errors
    /// The first thing found wrong.
    pub fn validate(&self) -> Result<(), TmpfsError> {
        let mut parts = self.path.strip_prefix('/').unwrap_or_default().split('/');
        if self.path.contains('\0') || parts.any(|part| matches!(part, "" | "." | "..")) {
            return Err(TmpfsError::Path(self.path.clone()));
        }
        if self.size.is_some_and(|size| size < ByteSize::kib(4)) {
            return Err(TmpfsError::Size(self.size.unwrap_or_default().to_string()));
        }
        if self.mode > 0o7777 {
            return Err(TmpfsError::Mode(format!("{:o}", self.mode)));
        }
        Ok(())
    }
}

/// Checks several, which must have different places.
///
/// # Errors
/// The first thing found wrong.
pub(crate) fn validate_all(all: &[Tmpfs]) -> Result<(), TmpfsError> {
    for (index, tmpfs) in all.iter().enumerate() {
        tmpfs.validate()?;
        if all.iter().take(index).any(|other| other.path == tmpfs.path) {
            return Err(TmpfsError::Twice(tmpfs.path.clone()));
        }
    }
    Ok(())
}

impl FromStr for Tmpfs {
    type Err = TmpfsError;

    /// `PATH[:OPTION,...]`.
    fn from_str(text: &str) -> Result<Self, TmpfsError> {
        let (path, options) = text.split_once(':').unwrap_or((text, ""));
        let mut tmpfs = Self {
            // A slash at the end means nothing, but for the root's.
            path: path
                .strip_suffix('/')
                .filter(|path| !path.is_empty())
                .unwrap_or(path)
                .to_owned(),
            size: None,
            mode: DEFAULT_MODE,
            exec: false,
        };
        for option in options.split(',').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("size", size)) => {
                    tmpfs.size = Some(size.parse().map_err(|_| TmpfsError::Size(size.to_owned()))?);
                }
                Some(("mode", mode)) => {
                    tmpfs.mode = u32::from_str_radix(mode, 8).map_err(|_| TmpfsError::Mode(mode.to_owned()))?;
                }
                None if option == "exec" => tmpfs.exec = true,
                None if option == "noexec" => tmpfs.exec = false,
                _ => return Err(TmpfsError::Option(option.to_owned())),
            }
        }
        tmpfs.validate()?;
        Ok(tmpfs)
    }
}

impl std::fmt::Display for Tmpfs {
    /// As it is parsed.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:mode={:o}", self.path, self.mode)?;
        if let Some(size) = self.size {
            write!(f, ",size={}", size.bytes())?;
        }
        f.write_str(if self.exec { ",exec" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_sizes_and_modes_are_read_and_written() {
        let plain: Tmpfs = "/run".parse().unwrap();
        assert_eq!((plain.size, plain.mode, plain.exec), (None, 0o1777, false));
        let full: Tmpfs = "/a/b/:size=64M,mode=0750,exec".parse().unwrap();
        assert_eq!(full.path, "/a/b");
        assert_eq!(
            (full.size, full.mode, full.exec),
            (Some(ByteSize::mib(64)), 0o750, true)
        );
        for tmpfs in [plain, full] {
            assert_eq!(tmpfs.to_string().parse(), Ok(tmpfs));
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let refusal = |text: &str| text.parse::<Tmpfs>().unwrap_err().to_string();
        for path in ["", "run", "/", "/a/../b", "/a//b", "/.", "//", ":size=1M", "/a\0b"] {
            assert!(refusal(path).contains("absolute path below /"), "{path}");
        }
        for size in ["0", "1", "lots", "", "-1"] {
            assert!(
                refusal(&format!("/a:size={size}")).contains("such as size=64M"),
                "{size}"
            );
        }
        for mode in ["8", "rwx", "", "17777", "-1"] {
            assert!(
                refusal(&format!("/a:mode={mode}")).contains("such as mode=1777"),
                "{mode}"
            );
        }
        assert!(refusal("/a:fast").contains("`fast` is no option"));
        assert!(refusal("/a:size").contains("size=SIZE"));
        let twice: Vec<Tmpfs> = ["/a", "/b", "/a:exec"].map(|text| text.parse().unwrap()).to_vec();
        assert_eq!(validate_all(&twice), Err(TmpfsError::Twice("/a".into())));
        assert_eq!(validate_all(&twice[..2]), Ok(()));
    }
}
