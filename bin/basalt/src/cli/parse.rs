//! What flags' values must look like. Each refusal says what is right.

use std::time::Duration;

use base::ByteSize;
use node_api::Limits;
use node_api::config::MIN_DISK;
use node_api::limits::parse_cpus;
use vmm_api::config::{MAX_CPUS, MIN_MEMORY};

/// The longest host name (`__NEW_UTS_LEN` of Linux).
const MAX_HOSTNAME: usize = 64;

pub(super) fn cpus(text: &str) -> Result<u32, String> {
    match text.parse::<u64>() {
        Ok(n) if n >= 1 && n <= u64::from(MAX_CPUS) => u32::try_from(n).map_err(|e| e.to_string()),
        Ok(n) => Err(format!("{n} CPUs cannot be had: give 1 to {MAX_CPUS}")),
        Err(_) => Err(format!(
            "a virtual machine has whole CPUs: give a number from 1 to {MAX_CPUS}"
        )),
    }
}

pub(super) fn memory(text: &str) -> Result<ByteSize, String> {
    let size: ByteSize = text.parse().map_err(|e: base::size::SizeError| e.to_string())?;
    if size < MIN_MEMORY {
        return Err(format!(
            "a virtual machine needs at least {MIN_MEMORY}: {size} is too little"
        ));
    }
    // Guest memory is whole pages; nobody counts the bytes of a half one.
    Ok(ByteSize(size.bytes() & !4095))
}

/// Thousandths of a processor.
pub(super) fn cpu_limit(text: &str) -> Result<u64, String> {
    let millis = parse_cpus(text).map_err(|error| error.to_string())?;
    let limits = Limits {
        cpu_millis: Some(millis),
        ..Limits::default()
    };
    limits.validate().map_err(|error| error.to_string())?;
    Ok(millis)
}

pub(super) fn env(text: &str) -> Result<String, String> {
    match text.split('=').next() {
        Some("") | None => Err("a variable needs a name: write KEY=VALUE or KEY".into()),
        Some(_) => Ok(text.to_owned()),
    }
}

pub(super) fn workdir(text: &str) -> Result<String, String> {
    if text.starts_with('/') {
        Ok(text.to_owned())
    } else {
        Err("the working directory is a path inside the image and starts with a slash".into())
    }
}

pub(super) fn user(text: &str) -> Result<String, String> {
    let mut parts = text.split(':');
    match (parts.next(), parts.next(), parts.next()) {
        (Some(user), None, _) if !user.is_empty() => Ok(text.to_owned()),
        (Some(user), Some(group), None) if !user.is_empty() && !group.is_empty() => Ok(text.to_owned()),
        _ => Err("write USER or USER:GROUP, by name or number".into()),
    }
}

pub(super) fn hostname(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    if text.is_empty() || text.len() > MAX_HOSTNAME || !text.chars().all(fits) {
        return Err(format!(
            "a host name has 1 to {MAX_HOSTNAME} letters, digits, hyphens and dots"
        ));
    }
    Ok(text.to_owned())
}

pub(super) fn image_name(text: &str) -> Result<String, String> {
    text.parse::<image::Reference>()
        .map(|_| text.to_owned())
        .map_err(|e| e.to_string())
}

/// A name and a password. What is refused is not repeated: it may be a password.
pub(super) fn creds(text: &str) -> Result<registry::Credentials, String> {
    match text.split_once(':') {
        Some((user, password)) if !user.is_empty() => Ok(registry::Credentials::basic_of(user, password)),
        _ => Err("write USER:PASSWORD".into()),
    }
}

pub(super) fn time_limit(text: &str) -> Result<super::hotplug::TimeLimit, String> {
    match text {
        "none" => Ok(super::hotplug::TimeLimit(None)),
        time => duration(time).map(|time| super::hotplug::TimeLimit(Some(time))),
    }
}

pub(super) fn duration(text: &str) -> Result<Duration, String> {
    const HELP: &str = "write a number of seconds, or one with a unit: 500ms, 30s, 5m, 2h";
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let number: u64 = digits.parse().map_err(|_| HELP.to_owned())?;
    let millis = match unit {
        "ms" => Some(number),
        "" | "s" => number.checked_mul(1000),
        "m" => number.checked_mul(60_000),
        "h" => number.checked_mul(3_600_000),
        _ => return Err(HELP.into()),
    };
    match millis {
        Some(0) => Err("no command ends in no time at all: give more than 0".into()),
        Some(millis) => Ok(Duration::from_millis(millis)),
        None => Err(HELP.into()),
    }
}

/// A duration that may be none at all.
pub(super) fn grace(text: &str) -> Result<Duration, String> {
    if matches!(text, "0" | "0s") {
        return Ok(Duration::ZERO);
    }
    duration(text)
}

pub(super) fn sandbox_name(text: &str) -> Result<String, String> {
    node_api::check_name(text)
        .map(|()| text.to_owned())
        .map_err(|error| error.to_string())
}

pub(super) fn disk(text: &str) -> Result<ByteSize, String> {
    let size: ByteSize = text.parse().map_err(|e: base::size::SizeError| e.to_string())?;
    if size.bytes() != 0 && size < MIN_DISK {
        return Err(format!(
            "a disk needs at least {MIN_DISK}: {size} is too little, and 0 is none"
        ));
    }
    Ok(size)
}

pub(super) fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("write KEY=VALUE".into()),
    }
}

/// A signal by number or name, with or without its `SIG`.
pub(super) fn signal(text: &str) -> Result<i32, String> {
    let name = text.to_ascii_uppercase();
    let name = name.strip_prefix("SIG").unwrap_or(&name);
    let named = SIGNALS
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, number)| *number);
    let number = named.or_else(|| name.parse().ok().filter(|number| (1..=64).contains(number)));
    number.ok_or_else(|| format!("`{text}` is no signal: write a name such as TERM, or a number from 1 to 64"))
}

/// Those that people send by name (signal(7)).
const SIGNALS: &[(&str, i32)] = &[
    ("HUP", libc::SIGHUP),
    ("INT", libc::SIGINT),
    ("QUIT", libc::SIGQUIT),
    ("ABRT", libc::SIGABRT),
    ("KILL", libc::SIGKILL),
    ("USR1", libc::SIGUSR1),
    ("USR2", libc::SIGUSR2),
    ("PIPE", libc::SIGPIPE),
    ("ALRM", libc::SIGALRM),
    ("TERM", libc::SIGTERM),
    ("CONT", libc::SIGCONT),
    ("STOP", libc::SIGSTOP),
    ("TSTP", libc::SIGTSTP),
    ("WINCH", libc::SIGWINCH),
];

/// `on` or `off`.
pub(crate) fn switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("give on or off".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_names_and_numbers() {
        for (text, number) in [("KILL", 9), ("sigterm", 15), ("SIGUSR1", 10), ("1", 1), ("64", 64)] {
            assert_eq!(signal(text), Ok(number));
        }
        for text in ["", "0", "65", "-9", "SIG", "FLY"] {
            assert!(signal(text).unwrap_err().contains("such as TERM"), "{text}");
        }
    }

    #[test]
    fn credentials_have_a_name_and_a_password() {
        assert_eq!(creds("a:b:c"), Ok(registry::Credentials::basic_of("a", "b:c")));
        for text in ["", ":b", "a"] {
            assert!(creds(text).unwrap_err().contains("USER:PASSWORD"), "{text}");
        }
    }

    #[test]
    fn disks_and_labels() {
        assert_eq!(disk("0"), Ok(ByteSize(0)));
        assert_eq!(disk("1g"), Ok(ByteSize::gib(1)));
        assert!(disk("1m").unwrap_err().contains("16 MiB"));
        assert_eq!(label("a=b=c"), Ok(("a".into(), "b=c".into())));
        assert!(label("a").is_err() && label("=b").is_err());
    }
}
