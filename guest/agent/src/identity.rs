//! Who a command runs as: `name|uid[:group|gid]` against the root's `/etc/passwd` and `/etc/group`. Pure functions over
//! the text of the two files.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;

/// User, groups and what the environment should say about them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Supplementary groups.
    pub(crate) groups: Vec<u32>,
    /// Name, if the user has one.
    pub(crate) name: Option<String>,
    pub(crate) home: String,
}

/// Reads the two files below `/etc` and resolves `spec`; the error is one sentence.
pub(crate) fn resolve(spec: Option<&str>) -> Result<Identity, String> {
    resolve_in(spec.unwrap_or("0"), &read("/etc/passwd")?, &read("/etc/group")?)
}

/// The most that is read of one of the two files. What lies behind is as if it were not there.
const MOST_TEXT: u64 = 4 << 20;

/// The file's text; empty if there is none, which is common in minimal images.
fn read(path: &str) -> Result<String, String> {
    let mut bytes = Vec::new();
    // Whatever somebody has put there is not waited for.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    match file.and_then(|file| file.take(MOST_TEXT).read_to_end(&mut bytes)) {
        Ok(_) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(format!("{path} cannot be read: {error}")),
    }
}

/// What users and groups are called.
#[derive(Debug, Default)]
pub(crate) struct Names {
    users: HashMap<u32, String>,
    groups: HashMap<u32, String>,
}

impl Names {
    /// Reads the two files. Where one cannot be read, there are numbers.
    pub(crate) fn read() -> Self {
        Self::parse(
            &read("/etc/passwd").unwrap_or_default(),
            &read("/etc/group").unwrap_or_default(),
        )
    }

    fn parse(passwd: &str, group: &str) -> Self {
        let mut names = Self::default();
        for user in passwd.lines().filter_map(User::parse) {
            keep(&mut names.users, user.uid, user.name);
        }
        for group in group.lines().filter_map(Group::parse) {
            keep(&mut names.groups, group.gid, group.name);
        }
        names
    }

    /// A user's name, or the number.
    pub(crate) fn user(&self, uid: u32) -> String {
        self.users.get(&uid).cloned().unwrap_or_else(|| uid.to_string())
    }

    /// A group's name, or the number.
    pub(crate) fn group(&self, gid: u32) -> String {
        self.groups.get(&gid).cloned().unwrap_or_else(|| gid.to_string())
    }
}

/// The first line of a number counts, and a name is none that is longer than any that Linux's tools make.
fn keep(names: &mut HashMap<u32, String>, id: u32, name: &str) {
    if name.len() <= 256 {
        names.entry(id).or_insert_with(|| name.to_owned());
    }
}

fn resolve_in(spec: &str, passwd: &str, group: &str) -> Result<Identity, String> {
    let (user, wanted_group) = match spec.split_once(':') {
        Some((user, group)) if !group.is_empty() => (user, Some(group)),
        Some((user, _)) => (user, None),
        None => (spec, None),
    };
    let user = if user.is_empty() { "0" } else { user };
    let number = parse_id(user);
    let entry = passwd
        .lines()
        .filter_map(User::parse)
        .find(|entry| entry.name == user)
        .or_else(|| {
            passwd
                .lines()
                .filter_map(User::parse)
                .find(|entry| Some(entry.uid) == number)
        });
    let mut identity = match (&entry, number) {
        (Some(entry), _) => Identity {
            uid: entry.uid,
            gid: entry.gid,
            groups: memberships(entry.name, group),
            name: Some(entry.name.to_owned()),
            home: if entry.home.is_empty() {
                "/".to_owned()
            } else {
                entry.home.to_owned()
            },
        },
        (None, Some(uid)) => Identity {
            uid,
            gid: 0,
            groups: Vec::new(),
            name: None,
            home: "/".to_owned(),
        },
        (None, None) => {
            return Err(format!(
                "the user {user:?} is neither in /etc/passwd nor a number: give a name that the file has, or a number \
                 such as 1000"
            ));
        }
    };
    if let Some(wanted) = wanted_group {
        let found = group
            .lines()
            .filter_map(Group::parse)
            .find(|entry| entry.name == wanted);
        identity.gid = found
            .map(|entry| entry.gid)
            .or_else(|| parse_id(wanted))
            .ok_or_else(|| {
                format!(
                    "the group {wanted:?} is neither in /etc/group nor a number: give a name that the file has, or a \
                     number such as 1000"
                )
            })?;
        // As podman: an explicit group is the only one.
        identity.groups.clear();
    }
    Ok(identity)
}

/// A user or group number. The largest one means "do not change" to the kernel and is none.
fn parse_id(text: &str) -> Option<u32> {
    text.parse().ok().filter(|id| *id != u32::MAX)
}

fn memberships(name: &str, group: &str) -> Vec<u32> {
    let entries = group.lines().filter_map(Group::parse);
    entries
        .filter(|entry| entry.members.split(',').any(|member| member == name))
        .map(|entry| entry.gid)
        .collect()
}

/// A line of passwd(5).
struct User<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

impl<'a> User<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.split(':');
        let name = fields.next().filter(|name| !name.is_empty())?;
        let uid = parse_id(fields.nth(1)?)?;
        let gid = parse_id(fields.next()?)?;
        Some(Self {
            name,
            uid,
            gid,
            home: fields.nth(1).unwrap_or_default(),
        })
    }
}

/// A line of group(5).
struct Group<'a> {
    name: &'a str,
    gid: u32,
    members: &'a str,
}

impl<'a> Group<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.split(':');
        let name = fields.next().filter(|name| !name.is_empty())?;
        let gid = parse_id(fields.nth(1)?)?;
        Some(Self {
            name,
            gid,
            members: fields.next().unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nbroken\n:x:1:1:::\nwww:x:33:33:www:/var/www:/bin/false\n\
        1000:x:7:8:a name of digits:/home/odd:\nhomeless:x:40:41\n";
    const GROUP: &str = "root:x:0:\nwww:x:33:\ndisk:x:6:www,root\naudio:x:29:root,www\nnot:x:30:wwwx\n";

    fn run(spec: &str) -> Result<(u32, u32, Vec<u32>, String), String> {
        resolve_in(spec, PASSWD, GROUP).map(|found| (found.uid, found.gid, found.groups, found.home))
    }

    #[test]
    fn names_and_numbers() {
        assert_eq!(run("www").unwrap(), (33, 33, vec![6, 29], "/var/www".into()));
        assert_eq!(run("33").unwrap(), (33, 33, vec![6, 29], "/var/www".into()));
        assert_eq!(run("4242").unwrap(), (4242, 0, vec![], "/".into()));
        assert_eq!(run("0").unwrap(), (0, 0, vec![6, 29], "/root".into()));
        assert_eq!(run("").unwrap().0, 0);
        // A name wins over a number.
        assert_eq!(run("1000").unwrap().0, 7);
        assert_eq!(run("homeless").unwrap(), (40, 41, vec![], "/".into()));
    }

    #[test]
    fn an_explicit_group_is_the_only_one() {
        assert_eq!(run("www:disk").unwrap(), (33, 6, vec![], "/var/www".into()));
        assert_eq!(run("www:77").unwrap(), (33, 77, vec![], "/var/www".into()));
        assert_eq!(run("9:9").unwrap(), (9, 9, vec![], "/".into()));
        assert_eq!(run("www:").unwrap(), (33, 33, vec![6, 29], "/var/www".into()));
    }

    #[test]
    fn unknown_ones_are_named() {
        for (spec, name, file) in [("nobody", "\"nobody\"", "passwd"), ("www:nope", "\"nope\"", "group")] {
            let error = run(spec).unwrap_err();
            assert!(error.contains(name) && error.contains(file), "{error}");
            assert!(error.contains("or a number such as 1000"), "{error}");
        }
        // -1 would leave the user unchanged: root.
        assert!(run("4294967295").is_err());
        assert!(run("www:4294967295").is_err());
        assert!(run("-1").is_err());
    }

    #[test]
    fn the_first_name_of_a_number_counts_and_without_one_it_is_a_number() {
        let long = "x".repeat(257);
        let names = Names::parse(&format!("{PASSWD}toor:x:0:0:::\n{long}:x:9:9:::\n"), GROUP);
        assert_eq!([names.user(0), names.user(33), names.user(7)], ["root", "www", "1000"]);
        assert_eq!(
            [names.user(9), names.user(4242), names.group(4242)],
            ["9", "4242", "4242"]
        );
        assert_eq!([names.group(6), names.group(33)], ["disk", "www"]);
    }

    #[test]
    fn no_files_at_all() {
        assert_eq!(resolve_in("0", "", "").unwrap().home, "/");
    }
}
