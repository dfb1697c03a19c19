//! The kernel's files that say which CPUs are used for something: what they said is remembered, taken away from, and put back.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use base::CpuSet;

use super::journal::Journal;
use super::{Error, Places, names};

/// The CPUs that an interrupt may come to.
const INTERRUPT: &str = "smp_affinity_list";

/// The same of interrupts that are asked for later.
const DEFAULT: &str = "default_smp_affinity";

/// How a file has its CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    List,
    Mask,
}

/// One of them.
#[derive(Debug)]
pub(super) struct CpuFile {
    path: PathBuf,
    form: Form,
    /// Some interrupts are where they are: those of a CPU, and such as their driver has spread.
    may_refuse: bool,
}

impl CpuFile {
    /// The CPUs of a cgroup; all of those above it, if it says nothing.
    pub(super) fn of_cgroup(cgroup: &Path) -> Self {
        Self {
            path: cgroup.join("cpuset.cpus"),
            form: Form::List,
            may_refuse: false,
        }
    }

    /// It has said nothing before.
    pub(super) fn is_new(&self, journal: &mut Journal) {
        journal.files.insert(self.path.clone(), String::new());
    }

    fn mask(path: PathBuf) -> Self {
        Self {
            path,
            form: Form::Mask,
            may_refuse: false,
        }
    }

    /// Keeps what it says, if it is not known yet; `before` was isolated until now.
    pub(super) fn remember(&self, journal: &mut Journal, before: &[CpuSet]) -> Result<(), Error> {
        if journal.files.contains_key(&self.path) {
            return Ok(());
        }
        if let Some(text) = read(&self.path)? {
            let default = (self.may_refuse)
                .then(|| was_default(journal, before, text.trim()))
                .flatten();
            let said = default.unwrap_or_else(|| text.trim().to_owned());
            journal.files.insert(self.path.clone(), said);
        }
        Ok(())
    }

    /// Has it say what it said but for these CPUs, and all the others if that were none.
    pub(super) fn narrow(&self, journal: &Journal, isolated: &CpuSet, control: &CpuSet) -> Result<(), Error> {
        let Some(text) = journal.files.get(&self.path) else {
            return Ok(());
        };
        let parsed = match self.form {
            Form::List => text.parse(),
            Form::Mask => CpuSet::of_mask(text),
        };
        let own = parsed.map_err(|error| Error::Format {
            path: self.path.clone(),
            why: error.to_string(),
        })?;
        let left = own.minus(isolated);
        let left = if left.is_empty() { control } else { &left };
        let text = match self.form {
            Form::List => left.to_string(),
            Form::Mask => left.mask(),
        };
        match write(&self.path, &text) {
            Err(Error::File { cause, .. }) if self.may_refuse => {
                log::debug!("{} stays as it is: {cause}", self.path.display());
                Ok(())
            }
            written => written,
        }
    }
}

/// Those of interrupts, future ones too, and of work that is bound to no CPU (Linux, `core-api/irq/irq-affinity.rst`,
/// `core-api/workqueue.rst`).
pub(super) fn of_host(places: &Places) -> Result<Vec<CpuFile>, Error> {
    let interrupts = places.proc.join("irq");
    let mut files = vec![
        CpuFile::mask(interrupts.join(DEFAULT)),
        CpuFile::mask(places.sys.join("devices/virtual/workqueue/cpumask")),
    ];
    let all = names(&interrupts)?;
    let numbers = all.iter().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
    files.extend(numbers.map(|number| CpuFile {
        path: interrupts.join(number).join(INTERRUPT),
        form: Form::List,
        may_refuse: true,
    }));
    Ok(files)
}

/// What an interrupt would have that was asked for while CPUs were isolated, and has what such get by now.
fn was_default(journal: &Journal, before: &[CpuSet], now: &str) -> Option<String> {
    let default = journal.files.iter().find(|(path, _)| path.ends_with(DEFAULT))?;
    let (default, now) = (CpuSet::of_mask(default.1).ok()?, now.parse::<CpuSet>().ok()?);
    let narrowed = |isolated: &CpuSet| now == default.minus(isolated);
    before.iter().any(narrowed).then(|| default.to_string())
}

/// All but `kept` say again what they said, and are forgotten.
pub(super) fn restore(journal: &mut Journal, kept: &[CpuFile], possible: &CpuSet) -> Result<(), Error> {
    let mut failed = None;
    journal.files.retain(|path, text| {
        if kept.iter().any(|file| file.path == *path) {
            return true;
        }
        let written = match text.as_str() {
            // Not while there are processes in it (6.1); all of them are the same as none.
            "" => write(path, "\n").or_else(|_| write(path, &possible.to_string())),
            text => write(path, text),
        };
        match written {
            // Most of those that stay as they are were never changed.
            Err(error) if path.ends_with(INTERRUPT) => {
                log::debug!("{} stays as it is: {error:?}", path.display());
                false
            }
            Err(error) => {
                failed.get_or_insert(error);
                true
            }
            Ok(()) => false,
        }
    });
    failed.map_or(Ok(()), Err)
}

/// The list in a file.
pub(super) fn list(path: &Path) -> Result<CpuSet, Error> {
    let text = fs::read_to_string(path).map_err(Error::file("read", path))?;
    text.parse().map_err(|error: base::cpu_set::CpuSetError| Error::Format {
        path: path.to_owned(),
        why: error.to_string(),
    })
}

/// An interrupt or a cgroup that is gone has none, and a kernel that does not offer it.
fn read(path: &Path) -> Result<Option<String>, Error> {
    match fs::read_to_string(path) {
        Err(error) if is_gone(&error) => Ok(None),
        read => read.map(Some).map_err(Error::file("read", path)),
    }
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    let written = fs::File::options()
        .truncate(true)
        .write(true)
        .open(path)
        .and_then(|mut file| io::Write::write_all(&mut file, text.as_bytes()));
    match written {
        Err(error) if is_gone(&error) => Ok(()),
        written => written.map_err(Error::file("write", path)),
    }
}

/// A cgroup that is removed while its file is open says the latter.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}
