# CUDA 13, compiled for every architecture from A100 on. PTX travels for 90 (also runs on 100) and for
# the newest, so that GPUs younger than this list can compile it at load time.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 86-real 89-real 90 120)
endif()
set(KEYHOLE_CUDA_INSTANCE_ARCHITECTURES "" CACHE STRING
  "Architectures for kernels with many instances, where fewer will do than CMAKE_CUDA_ARCHITECTURES; empty: the same")
option(KEYHOLE_CUDA_HOPPER "Compile the kernels of 9.0a, also where 90 is not among the architectures" OFF)
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13.0)
  message(FATAL_ERROR "KEYHOLE_CUDA needs CUDA 13.0 or newer, found ${CMAKE_CUDA_COMPILER_VERSION}")
endif()
# CMake 3.25.1 (Debian 12) does not know yet that nvcc has had C++20 since 12.0.
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
find_package(CUDAToolkit 13.0 REQUIRED)
