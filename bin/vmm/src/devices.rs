//! Has each device made by its module. Knows modules by their kinds' names alone.

use std::sync::Arc;

use device::{
    Balloon, BalloonedDma, CreateError, DeviceContext, DmaSpaces, Endpoints, FdTable, GuestPages, HotplugRegion,
    MapTuning, PluggableDma, PluggableMemory, ResizeBalloon, SpaceAlarm, parse_config,
};
use machine::{Ballooned, Iommu, NamedDevice, NamedFunction, Pluggable};
use memory::Pins;
use memory::layout::{self, MemorySize};
use observe::Registry;
use vm_memory::{Address, GuestMemoryRegion, GuestRegionMmap};
use vmm_api::devices::BalloonConfig;
use vmm_api::{ApiError, DeviceSpec, ErrorKind};

use crate::catalog::{self, Module};
use crate::refusal::refuse;

fn module(spec: &DeviceSpec) -> Result<Module, ApiError> {
    catalog::find(&spec.kind).ok_or_else(|| {
        let kinds = catalog::kinds();
        let message = format!(
            "device `{}` is of kind `{}`, which is unknown: there are {kinds}",
            spec.id, spec.kind
        );
        refuse(ErrorKind::Invalid, message)
    })
}

fn named(spec: &DeviceSpec) -> impl Fn(CreateError) -> ApiError {
    move |error| refuse(ErrorKind::Invalid, format!("device `{}`: {error}", spec.id))
}

/// What a VM has that its devices are made with.
#[derive(Clone, Copy)]
pub(crate) struct Surroundings<'a> {
    pub(crate) registry: &'a Registry,
    pub(crate) no_space: &'a SpaceAlarm,
    /// How much memory it has, and can plug.
    pub(crate) memory: MemorySize,
    /// Whether the host's pages of its memory have to stay.
    pub(crate) pins: &'a Pins,
}

/// What was made.
#[derive(Default)]
pub(crate) struct Created {
    pub(crate) devices: Vec<NamedDevice>,
    /// Of the device among them that plugs memory.
    pub(crate) pluggable: Option<Pluggable>,
    /// Files that are memory, in the order of their addresses.
    pub(crate) pmem: Vec<Arc<GuestRegionMmap<()>>>,
    /// Of the one that is an IOMMU.
    pub(crate) iommu: Option<Iommu>,
    /// Of the one by which the guest gives memory back.
    pub(crate) balloon: Option<Arc<dyn ResizeBalloon>>,
    /// Of the same, if functions do without what is in it.
    pub(crate) ballooned: Option<Ballooned>,
}

impl Created {
    /// What is put into a machine with them, and who asks its guest for memory.
    pub(crate) fn beside(
        self,
        functions: Vec<NamedFunction>,
        pins: Pins,
    ) -> (machine::Devices, Option<Arc<dyn ResizeBalloon>>) {
        let devices = machine::Devices {
            devices: self.devices,
            functions,
            pluggable: self.pluggable,
            ballooned: self.ballooned,
            iommu: self.iommu,
            pmem: self.pmem,
            pins,
        };
        (devices, self.balloon)
    }
}

/// Those that this process is.
pub(crate) fn create_devices(
    specs: &[DeviceSpec],
    fds: &mut FdTable,
    surroundings: Surroundings<'_>,
) -> Result<Created, ApiError> {
    let mut created = Created::default();
    let region = HotplugRegion::of(surroundings.memory);
    let dma = region.map(|region| (region, PluggableDma::new(region.memory)));
    for spec in specs {
        let context = DeviceContext {
            id: &spec.id,
            metrics: surroundings.registry,
            no_space: surroundings.no_space,
        };
        let device = match module(spec)? {
            Module::Device(module) => module.create(spec, fds, &context).map_err(named(spec))?,
            Module::Balloon(module) => {
                let ballooned = ballooned(spec, surroundings.memory)?;
                let pages = GuestPages {
                    pins: surroundings.pins.clone(),
                    pluggable: dma.as_ref().map(|(_, dma)| dma.clone()),
                    ballooned: ballooned.clone(),
                };
                let made = module.create(spec, &context, Box::new(pages));
                let Balloon { device, resize } = made.map_err(named(spec))?;
                created.ballooned = ballooned.map(|dma| Ballooned {
                    resize: Arc::clone(&resize),
                    dma,
                });
                created.balloon = Some(resize);
                device
            }
            Module::Iommu(module) => {
                let endpoints = Endpoints::default();
                let device = module.create(spec, &context, endpoints.clone()).map_err(named(spec))?;
                created.iommu = Some(Iommu {
                    id: spec.id.clone(),
                    endpoints,
                });
                device
            }
            Module::Memory(module) => {
                let (region, dma) = dma.clone().ok_or_else(|| no_region(spec))?;
                let made = module.create(spec, &context, region, Box::new(dma.clone()));
                let PluggableMemory { device, resize } = made.map_err(named(spec))?;
                created.pluggable = Some(Pluggable { resize, dma });
                device
            }
            Module::Pmem(module) => {
                let start = next_pmem(&created.pmem, surroundings.memory);
                let made = module.create(spec, fds, &context, start).map_err(named(spec))?;
                created.pmem.push(made.region);
                made.device
            }
            Module::Function(_) => continue,
        };
        created.devices.push(NamedDevice {
            id: spec.id.clone(),
            device,
        });
    }
    Ok(created)
}

/// What functions do without, if they do.
fn ballooned(spec: &DeviceSpec, memory: MemorySize) -> Result<Option<BalloonedDma>, ApiError> {
    let config: BalloonConfig = parse_config(spec).map_err(named(spec))?;
    let tuning = config.dma.map(|dma| MapTuning {
        merge: dma.merge,
        ahead: dma.map_ahead,
    });
    Ok(tuning.map(|tuning| BalloonedDma::new(memory, tuning)))
}

/// Where the next file of memory begins.
fn next_pmem(before: &[Arc<GuestRegionMmap<()>>], memory: MemorySize) -> u64 {
    match before.last() {
        Some(last) => (last.last_addr().raw_value() + 1).next_multiple_of(layout::PMEM_ALIGNMENT),
        None => layout::pmem(memory).start,
    }
}

fn no_region(spec: &DeviceSpec) -> ApiError {
    let message = format!(
        "device `{}` plugs memory, and the VM was saved without any that can be plugged: restore it with the devices that it had",
        spec.id
    );
    refuse(ErrorKind::Invalid, message)
}

/// Those that the host has, which share the VM's address space.
pub(crate) fn create_functions(
    specs: &[DeviceSpec],
    fds: &mut FdTable,
    spaces: &mut DmaSpaces,
) -> Result<Vec<NamedFunction>, ApiError> {
    let mut functions = Vec::new();
    for spec in specs {
        if let Module::Function(module) = module(spec)? {
            functions.push(NamedFunction {
                id: spec.id.clone(),
                function: module.create(spec, fds, spaces).map_err(named(spec))?,
            });
        }
    }
    Ok(functions)
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::ByteSize;
    use vmm_api::devices::{IommuConfig, MemConfig, RngConfig};

    #[test]
    fn memory_is_plugged_where_the_machine_has_it_and_nowhere_else() {
        let config: MemConfig = serde_json::from_str(r#"{"region_size":536870912}"#).unwrap();
        let specs = [
            DeviceSpec::new("rng", &RngConfig {}).unwrap(),
            DeviceSpec::new("balloon", &BalloonConfig::default()).unwrap(),
            DeviceSpec::new("memory", &config).unwrap(),
        ];
        let (registry, no_space) = (Registry::new(), SpaceAlarm::new().unwrap());
        let made = |specs: &[DeviceSpec], hotplug: u64| {
            let surroundings = Surroundings {
                registry: &registry,
                no_space: &no_space,
                memory: MemorySize::from(ByteSize::gib(5)).with_hotplug(ByteSize(hotplug)),
                pins: &Pins::default(),
            };
            create_devices(specs, &mut FdTable::default(), surroundings)
        };
        let region = 512 << 20;
        let Created {
            devices,
            pluggable,
            iommu,
            balloon,
            ..
        } = made(&specs, region).unwrap();
        assert!(iommu.is_none());
        let names: Vec<_> = devices.iter().map(|device| device.id.as_str()).collect();
        assert_eq!(names, ["rng", "balloon", "memory"]);
        let mut addr = [0; 8];
        devices[2].device.read_config(16, &mut addr);
        assert_eq!(u64::from_le_bytes(addr), 6 << 30, "above the hole and all RAM");
        pluggable.unwrap().resize.request(4 << 20).unwrap();
        let mut requested = [0; 8];
        devices[2].device.read_config(48, &mut requested);
        assert_eq!(
            u64::from_le_bytes(requested),
            4 << 20,
            "who resizes it reaches the device"
        );
        balloon.unwrap().request(4 << 20).unwrap();
        let mut num_pages = [0; 4];
        devices[1].device.read_config(0, &mut num_pages);
        assert_eq!(u32::from_le_bytes(num_pages), 1024);
        let refused = made(&specs, 0).err().unwrap();
        assert!(refused.message.contains("device `memory`"), "{refused}");
        let iommu = DeviceSpec::new("iommu", &IommuConfig {}).unwrap();
        let made_iommu = made(&[iommu], 0).unwrap().iommu;
        assert_eq!(made_iommu.unwrap().id, "iommu");
        let neither = made(&specs[..1], region).unwrap();
        assert!(neither.pluggable.is_none() && neither.balloon.is_none());
    }
}
