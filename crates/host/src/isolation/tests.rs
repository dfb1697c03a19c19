//! On a host of files: what is written where, and that all of it says again what it said. What the kernel makes of it is for the lab.

use std::fs;

use tempfile::TempDir;

use super::*;

const IRQS: [(&str, &str); 4] = [("7", "0-3"), ("8", "2-3"), ("9", "1"), ("11", "0-2")];

fn set(text: &str) -> CpuSet {
    text.parse().unwrap()
}

struct Fake {
    directory: TempDir,
    isolation: Isolation,
}

impl Fake {
    /// Four CPUs, and cgroups of a service and of a node with a sandbox.
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let places = Places {
            proc: at("proc"),
            sys: at("sys"),
            cgroup: Some(at("cgroup")),
            journal: at("run"),
        };
        let fake = Self {
            isolation: Isolation { places },
            directory,
        };
        for name in ["online", "possible", "present"] {
            fake.write(&format!("sys/devices/system/cpu/{name}"), "0-3\n");
        }
        for cpu in 0..4 {
            fake.write(&format!("sys/devices/system/cpu/cpu{cpu}/online"), "1\n");
        }
        fake.write("sys/devices/virtual/workqueue/cpumask", "f\n");
        fake.write("proc/irq/default_smp_affinity", "f\n");
        for (number, cpus) in IRQS {
            fake.write(&format!("proc/irq/{number}/smp_affinity_list"), cpus);
        }
        for cgroup in ["", "/service", "/node", "/node/daemon", "/node/one", "/node/two"] {
            fake.write(&format!("cgroup{cgroup}/cgroup.subtree_control"), "memory pids\n");
            fake.write(&format!("cgroup{cgroup}/cpuset.cpus"), "\n");
            fake.write(&format!("cgroup{cgroup}/cgroup.events"), "populated 1\nfrozen 0\n");
        }
        fake.write("cgroup/cgroup.threads", "");
        fake
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.directory.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn read(&self, name: &str) -> String {
        let text = fs::read_to_string(self.directory.path().join(name)).unwrap();
        text.trim().to_owned()
    }

    fn everything(&self) -> Vec<String> {
        let mut all = vec![
            self.read("sys/devices/virtual/workqueue/cpumask"),
            self.read("proc/irq/default_smp_affinity"),
        ];
        all.extend(IRQS.map(|(number, _)| self.read(&format!("proc/irq/{number}/smp_affinity_list"))));
        all.extend(
            ["service", "node", "node/daemon", "node/one"].map(|name| self.read(&format!("cgroup/{name}/cpuset.cpus"))),
        );
        all
    }

    fn used(&self) -> Vec<Use> {
        let cpus = self.isolation.cpus().unwrap();
        cpus.into_iter().map(|cpu| cpu.used).collect()
    }

    fn owner(&self, name: &str) -> Owner {
        Owner::new(name, &self.directory.path().join("cgroup/node").join(name))
    }

    /// As `dedicate` does, but for what only cgroups can do.
    fn own(&self, name: &str, cpus: &str) {
        let mut locked = self.isolation.lock().unwrap();
        for cpu in set(cpus).iter() {
            locked.journal.dedicated.insert(cpu, self.owner(name));
        }
        self.isolation.apply(&mut locked).unwrap();
    }

    fn journal(&self) -> bool {
        self.directory.path().join("run").exists()
    }
}

#[test]
fn what_is_isolated_is_in_no_file_and_what_is_given_back_in_all_again() {
    let fake = Fake::new();
    let before = fake.everything();
    fake.isolation.isolate(&set("3")).unwrap();
    assert_eq!(
        fake.everything(),
        ["00000007", "00000007", "0-2", "2", "1", "0-2", "0-2", "0-2", "", ""],
        "a sandbox is limited by the node's cgroup above it"
    );
    assert_eq!(fake.read("cgroup/cgroup.subtree_control"), "+cpuset");
    assert_eq!(
        fake.read("sys/devices/system/cpu/cpu3/online"),
        "1",
        "it was offline, and came back"
    );
    assert_eq!(fake.used(), [Use::Shared, Use::Shared, Use::Shared, Use::Isolated]);
    // Both of an interrupt's.
    fake.isolation.isolate(&set("2")).unwrap();
    assert_eq!(fake.read("proc/irq/8/smp_affinity_list"), "0-1");
    assert_eq!(fake.isolation.give_back(None).unwrap(), set("2-3"));
    assert_eq!(fake.everything(), before);
    assert_eq!(fake.read("cgroup/cgroup.subtree_control"), "-cpuset");
    assert_eq!(fake.used(), [Use::Shared; 4]);
    assert!(!fake.journal());
}

#[test]
fn a_sandbox_that_owns_cpus_is_not_kept_off_them_and_all_beside_it_are() {
    let fake = Fake::new();
    let before = fake.everything();
    fake.isolation.isolate(&set("3")).unwrap();
    fake.own("two", "3");
    assert_eq!(
        fake.everything()[6..],
        ["0-2", "", "0-2", "0-2"],
        "the service, the node on the way, its daemon, the other sandbox"
    );
    assert_eq!(fake.read("cgroup/node/two/cpuset.cpus"), "");
    assert_eq!(fake.used()[3], Use::Dedicated);
    let refused = fake.isolation.give_back(Some(&set("3")));
    // It is the operator's still, and goes back when the sandbox ends.
    assert_eq!(refused.unwrap(), set("3"));
    fake.isolation.isolate(&set("3")).unwrap_err();
    fake.isolation.release("two").unwrap();
    assert_eq!(fake.everything(), before);
    assert!(!fake.journal());
}

#[test]
fn what_a_sandbox_owned_that_is_gone_is_given_back_by_whoever_comes_next() {
    let fake = Fake::new();
    let before = fake.everything();
    fake.own("two", "2-3");
    fs::remove_dir_all(fake.owner("two").cgroup).unwrap();
    fake.isolation.sweep().unwrap();
    assert_eq!(fake.everything(), before);
    assert!(!fake.journal());
}

#[test]
fn a_reservation_that_is_refused_takes_the_next_and_is_the_sandboxs_until_it_ends() {
    let fake = Fake::new();
    let reserved = fake.isolation.reserve("one", 1, |cpus| match cpus.contains(3) {
        true => Err(Refused::Cpu(3, "busy")),
        false => {
            fake.write("sys/devices/system/cpu/online", "0-1,3\n");
            Ok(cpus.to_string())
        }
    });
    assert_eq!(reserved.unwrap(), Ok("2".to_owned()));
    assert_eq!(fake.used()[2], Use::Bare);
    let cpus = fake.isolation.cpus().unwrap();
    assert_eq!(cpus[2].sandbox.as_deref(), Some("one"));
    let all = fake
        .isolation
        .reserve("one", 1, |_| -> Result<(), _> { Err(Refused::All("gone")) });
    assert_eq!(all.unwrap(), Err("gone"));
    fake.isolation.release("one").unwrap();
    assert_eq!(fake.used()[2], Use::Offline);
    assert!(!fake.journal());
}

#[test]
fn what_cannot_be_isolated_is_refused_with_the_reason() {
    let fake = Fake::new();
    let before = fake.everything();
    let isolate = |cpus: &str| fake.isolation.isolate(&set(cpus)).unwrap_err().to_string();
    assert!(isolate("0").contains("leave it out"));
    assert!(isolate("2-5").contains("no CPU 4-5 is online"));
    fake.own("two", "3");
    assert!(isolate("2-3").contains("`basalt stop two`"));
    let back = fake.isolation.give_back(Some(&set("3"))).unwrap_err().to_string();
    assert!(back.contains("sandbox two's"), "{back}");
    fake.isolation.release("two").unwrap();
    let back = fake.isolation.give_back(Some(&set("1"))).unwrap_err().to_string();
    assert!(back.contains("not isolated"), "{back}");
    assert_eq!(fake.everything(), before);
}

#[test]
fn what_cannot_be_written_is_told_and_taken_back() {
    let fake = Fake::new();
    let before = fake.everything();
    fs::remove_file(fake.directory.path().join("cgroup/cgroup.threads")).unwrap();
    let error = fake.isolation.isolate(&set("3")).unwrap_err();
    assert!(matches!(error, Error::File { .. }), "{error}");
    fake.write("cgroup/cgroup.threads", "");
    fake.isolation.sweep().unwrap();
    assert_eq!(fake.everything(), before);
}

#[test]
fn a_cgroup_that_comes_while_something_is_isolated_is_kept_off_and_let_back() {
    let fake = Fake::new();
    fake.own("two", "3");
    let new = fake.directory.path().join("cgroup/node/three");
    fake.write("cgroup/node/three/cpuset.cpus", "\n");
    fake.isolation.admit(&new).unwrap();
    assert_eq!(fake.read("cgroup/node/three/cpuset.cpus"), "0-2");
    fake.isolation.isolate(&set("2")).unwrap();
    assert_eq!(fake.read("cgroup/node/three/cpuset.cpus"), "0-1");
    // An interrupt that somebody has asked for meanwhile.
    fake.write("proc/irq/10/smp_affinity_list", "0-1");
    fake.isolation.isolate(&set("1")).unwrap();
    assert_eq!(fake.read("proc/irq/10/smp_affinity_list"), "0");
    fake.isolation.give_back(None).unwrap();
    assert_eq!(fake.read("cgroup/node/three/cpuset.cpus"), "0-2");
    fake.isolation.release("two").unwrap();
    assert_eq!(fake.read("cgroup/node/three/cpuset.cpus"), "");
    assert_eq!(fake.read("proc/irq/10/smp_affinity_list"), "0-3");
    assert!(!fake.journal());
}

#[test]
fn whoever_died_with_a_cpu_offline_leaves_word_of_it() {
    let fake = Fake::new();
    let before = fake.everything();
    fake.own("two", "3");
    let mut locked = fake.isolation.lock().unwrap();
    (locked.journal.emptying, locked.journal.emptied) = (Some(3), CpuSet::default());
    locked.store().unwrap();
    drop(locked);
    fake.write("sys/devices/system/cpu/cpu3/online", "0");
    fake.isolation.release("two").unwrap();
    assert_eq!(fake.read("sys/devices/system/cpu/cpu3/online"), "1");
    assert_eq!(fake.everything(), before);
    assert!(!fake.journal());
}

#[test]
fn a_sandbox_whose_taker_and_processes_are_gone_owns_nothing() {
    let fake = Fake::new();
    let before = fake.everything();
    fake.own("two", "3");
    fake.write("cgroup/node/two/cgroup.events", "populated 0\nfrozen 0\n");
    fake.isolation.sweep().unwrap();
    assert_eq!(fake.used()[3], Use::Dedicated, "this process may be about to start it");
    let mut locked = fake.isolation.lock().unwrap();
    locked.journal.dedicated.get_mut(&3).unwrap().taker = (std::process::id(), 0);
    locked.store().unwrap();
    drop(locked);
    fake.isolation.sweep().unwrap();
    assert_eq!(fake.everything(), before);
    assert!(!fake.journal());
}
