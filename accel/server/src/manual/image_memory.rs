//! How much memory an image takes, before there is one: for the quota, and for zeroes to make it of.

use accel_proto::opencl::{ImageDesc, ImageFormat};

/// Numbers of the API (cl.h).
const IMAGE1D: u32 = 0x10f4;
const IMAGE1D_ARRAY: u32 = 0x10f5;
const IMAGE2D: u32 = 0x10f1;
const IMAGE2D_ARRAY: u32 = 0x10f3;

/// Bytes of an element in formats that are not known here: no format of the API has more, which are four channels of 32 bits.
const LONGEST: u64 = 16;

/// Bytes of an element (OpenCL API, "Image Format Descriptor"), never fewer than there are.
pub(super) fn element(format: ImageFormat) -> u64 {
    let channel = match format.image_channel_data_type {
        // CL_UNORM_SHORT_565, CL_UNORM_SHORT_555: all channels in one.
        0x10d4 | 0x10d5 => return 2,
        // CL_UNORM_INT_101010, CL_UNORM_INT_101010_2.
        0x10d6 | 0x10e0 => return 4,
        // CL_SNORM_INT8, UNORM_INT8, SIGNED_INT8, UNSIGNED_INT8.
        0x10d0 | 0x10d2 | 0x10d7 | 0x10da => 1,
        // CL_SNORM_INT16, UNORM_INT16, SIGNED_INT16, UNSIGNED_INT16, HALF_FLOAT.
        0x10d1 | 0x10d3 | 0x10d8 | 0x10db | 0x10dd => 2,
        _ => 4,
    };
    let channels = match format.image_channel_order {
        // CL_R, A, INTENSITY, LUMINANCE, DEPTH.
        0x10b0 | 0x10b1 | 0x10b8 | 0x10b9 | 0x10bd => 1,
        // CL_RG, RA, Rx.
        0x10b2 | 0x10b3 | 0x10ba => 2,
        _ => 4,
    };
    (channel * channels).min(LONGEST)
}

/// Bytes of an image whose rows follow each other without gaps; nothing if no number of 64 bits can say it.
pub(crate) fn all(of: &ImageDesc, format: Option<ImageFormat>) -> Option<u64> {
    let rows = match of.image_type {
        IMAGE1D | IMAGE1D_ARRAY => 1,
        _ => of.image_height.max(1),
    };
    let slices = match of.image_type {
        IMAGE1D | IMAGE2D => 1,
        IMAGE1D_ARRAY | IMAGE2D_ARRAY => of.image_array_size.max(1),
        _ => of.image_depth.max(1),
    };
    let samples = u64::from(of.num_samples).max(1);
    // All smaller levels together have no more than the largest.
    let levels = if of.num_mip_levels > 1 { 2 } else { 1 };
    let factors = [rows, slices, samples, levels, format.map_or(LONGEST, element)];
    factors.into_iter().try_fold(of.image_width, u64::checked_mul)
}

#[cfg(test)]
mod tests {
    use accel_proto::Handle;

    use super::*;

    #[test]
    fn no_image_is_taken_for_less_than_it_has() {
        let rgba8 = ImageFormat {
            image_channel_order: 0x10b5,
            image_channel_data_type: 0x10da,
        };
        let mut image = ImageDesc {
            image_type: IMAGE2D,
            image_width: 10,
            image_height: 20,
            image_depth: 7,
            image_array_size: 9,
            image_row_pitch: 0,
            image_slice_pitch: 0,
            num_mip_levels: 0,
            num_samples: 0,
            mem_object: Handle::NULL,
        };
        assert_eq!(all(&image, Some(rgba8)), Some(800));
        for (kind, bytes) in [
            (IMAGE1D, 40),
            (IMAGE1D_ARRAY, 360),
            (IMAGE2D_ARRAY, 7200),
            (0x10f2, 5600),
        ] {
            image.image_type = kind;
            assert_eq!(all(&image, Some(rgba8)), Some(bytes), "{kind:#x}");
        }
        image.image_type = IMAGE2D;
        image.num_mip_levels = 4;
        assert_eq!(all(&image, Some(rgba8)), Some(1600));
        image.image_width = u64::MAX;
        assert_eq!(all(&image, Some(rgba8)), None);
        for (order, data_type, bytes) in [
            (0x10b0, 0x10de, 4),
            (0x10b2, 0x10dd, 4),
            (0x10b4, 0x10d4, 2),
            (0x99, 0x99, 16),
        ] {
            let format = ImageFormat {
                image_channel_order: order,
                image_channel_data_type: data_type,
            };
            assert_eq!(element(format), bytes, "{order:#x} {data_type:#x}");
        }
    }
}
